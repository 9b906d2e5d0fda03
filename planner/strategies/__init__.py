"""The strategies that an operator can take."""
