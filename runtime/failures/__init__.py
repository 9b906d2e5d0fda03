"""What ranks agree upon, and what they say of each other when one is lost."""
