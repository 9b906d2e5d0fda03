"""Chooses plans: strategies, memory and cost models, simulator, ILP, bound, search."""
