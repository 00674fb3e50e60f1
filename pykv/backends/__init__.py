"""What runs a model's arithmetic."""
