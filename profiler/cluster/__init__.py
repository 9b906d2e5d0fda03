"""A cluster: its figures, where they come from, and what was measured on it."""
