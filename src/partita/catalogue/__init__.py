"""Device and link types as data files, and the ways to write down a cluster of them."""
