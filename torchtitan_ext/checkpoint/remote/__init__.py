"""What an exported folder tells tools that do not have this package."""
