"""What happens around an optimizer step."""
