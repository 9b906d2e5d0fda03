"""The public name of `osdp.compat.zero3_partition`."""

from osdp.compat.zero3_partition import Balance, assign, module_of, owner_pins, zero3_partition_tensors

__all__ = ["Balance", "assign", "module_of", "owner_pins", "zero3_partition_tensors"]
