"""OSDP inside of other training frameworks: one module for each, imported by who has the framework."""
