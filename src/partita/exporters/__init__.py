"""Plans as code: a package of one module a stage, and PipeDream's files."""
