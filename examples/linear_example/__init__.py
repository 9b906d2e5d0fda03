"""A stack of linear layers, trained by DDP, FSDP2 or OSDP with the flags of the FSDP tutorial."""
