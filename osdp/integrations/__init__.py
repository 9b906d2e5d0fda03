"""Training loops of other projects, for models that OSDP has sharded: one file each."""
