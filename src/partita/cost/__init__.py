"""The one cost model: durations, memory, objectives, Programs and what becomes of them."""
