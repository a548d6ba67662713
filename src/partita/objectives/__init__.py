"""The published objectives, one file each: plans compared on their authors' terms.

Their rows are in ``core/metrics.py``, and ``value`` calls them. Seconds are those of one batch of
the graph as it was profiled, whatever the plan's microbatches. A plan must fit its problem
(``plan.check_fits``, which ``value.evaluate_published`` calls).
"""
