"""Checks of OSDP on a machine with GPUs, which `scripts/validate_gpu.py` runs one by one."""
