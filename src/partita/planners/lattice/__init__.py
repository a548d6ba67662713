"""The core that planners over contiguous splits share: contracted graphs, ideals, linear orders."""
