"""Training a language model under a plan: configuration, data, ranks, the loop and what it measures."""
