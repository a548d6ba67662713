"""Assignments of ops to devices under DynamicMLTrainer's sharding cost, and by measured plans."""
