"""The HTTP interface of a live fleet."""
