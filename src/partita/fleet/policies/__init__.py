"""Who runs where: orderings and allocators over a snapshot of a fleet."""
