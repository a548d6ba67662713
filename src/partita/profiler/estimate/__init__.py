"""Costs of ops on devices that are not here, by shapes and a roofline."""
