"""Measures models and machines. `profiler.model_graph` and `profiler.cluster.cluster` hold the plain results."""
