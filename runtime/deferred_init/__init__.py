"""Initialises a model shard by shard, with the values that it would have as a whole."""
