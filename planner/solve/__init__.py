"""The fastest choice among one set of options within a limit, and a bound on every other."""
