"""What a finished plan is made of, and how it compares."""
