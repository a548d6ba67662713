"""A model as a graph of ops that runs again: tracing, replay with live parameters, stages."""
