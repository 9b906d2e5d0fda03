"""On-demand communication for FSDP1 (`fsdp1`) and FSDP2 (`fsdp2`)."""
