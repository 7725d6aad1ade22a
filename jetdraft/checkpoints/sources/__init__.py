"""What checkpoints say of the sources that they read."""
