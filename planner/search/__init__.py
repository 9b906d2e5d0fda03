"""The search for the fastest plan that fits."""
