"""The command line: parse, read, call, write."""
