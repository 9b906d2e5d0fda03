"""Times a model and its device."""
