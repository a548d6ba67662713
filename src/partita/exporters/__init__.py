"""Plans as code: a package with a module for each stage, and PipeDream's files."""
