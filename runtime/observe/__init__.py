"""What a model holds and sends as it runs."""
