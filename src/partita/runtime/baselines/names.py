"""What runs are compared with, by name; nothing heavy is imported for a list of names."""

PLANNED_BASELINES = ("single", "expert", "random")
"""Plans that our executor runs."""

TORCH_WAYS = ("ddp", "fsdp", "torch-1f1b")
"""Torch's own ways."""

BASELINES = (*PLANNED_BASELINES, *TORCH_WAYS)
