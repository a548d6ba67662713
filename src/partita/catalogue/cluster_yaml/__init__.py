"""Clusters described in YAML: the reader, the links of a description, the writer."""
