"""Interfaces of the programs that OSDP grew out of."""
