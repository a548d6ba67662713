"""Devices whose clocks can be set and whose energy can be read, behind one small protocol."""
