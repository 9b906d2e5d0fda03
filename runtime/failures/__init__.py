"""What ranks agree upon, and how a lost rank is found and named."""
