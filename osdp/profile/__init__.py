"""Measuring a machine: what `osdp profile` does on every rank, and the cluster file that comes of it."""
