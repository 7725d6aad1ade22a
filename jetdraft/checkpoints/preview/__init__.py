"""What is checked of a checkpoint before any weight is read."""
