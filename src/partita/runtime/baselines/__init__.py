"""What our executor is compared with."""
