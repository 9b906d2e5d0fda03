"""Executes plans on PyTorch's distributed stack."""
