"""Uneven work: lengths of samples, how they are packed and dealt to ranks, and what each rank then does when."""
