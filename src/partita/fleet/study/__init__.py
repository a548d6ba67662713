"""Traces on order, and studies of policies on them."""
