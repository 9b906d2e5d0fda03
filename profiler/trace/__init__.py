"""Traces a model without data: its operators and what each costs."""
