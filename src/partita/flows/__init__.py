"""Questions that need several parts: comparing planners, explaining a plan, what-if."""
