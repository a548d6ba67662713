"""How the speed of a training script depends on CPUs and memory."""
