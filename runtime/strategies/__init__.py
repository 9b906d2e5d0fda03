"""How a unit is wrapped, one file for each way."""
