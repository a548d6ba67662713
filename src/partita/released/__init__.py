"""What reproduces published code, its faults included; imported only when it is asked for."""
