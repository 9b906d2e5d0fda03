"""What a plan costs: memory, computation and communication."""
