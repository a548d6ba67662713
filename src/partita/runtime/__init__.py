"""Runs Programs with torch: in one process (the interpreter), and over many."""
