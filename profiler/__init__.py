"""Measures models and machines. `profiler.graph` and `profiler.cluster` hold the plain results."""
