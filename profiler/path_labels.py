"""What people read where a module's path is: that of the model itself is empty."""

ITSELF = "the model itself"
"""For the operator of what a model owns outside of its modules, as a transformer its table of positions."""


def path_label(path: str) -> str:
    """Return what to show of a path."""
    return path or ITSELF
