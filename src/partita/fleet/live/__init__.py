"""The live scheduler: rounds and leases on an engine that starts and stops real jobs."""
