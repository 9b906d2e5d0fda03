"""What a stage can be: its options with their memory and time at any micro-batch, as arrays."""
