"""The data types of the flow and the functions on them that need nothing else."""
