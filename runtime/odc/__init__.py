"""On-demand communication (ODC): ranks read each other's parameters and add to each other's gradients unasked."""
