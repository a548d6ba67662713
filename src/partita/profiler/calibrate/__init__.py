"""Devices and links, measured and written as a cluster."""
