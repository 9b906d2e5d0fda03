"""Compiles plans to code and configuration files that run without OSDP."""
