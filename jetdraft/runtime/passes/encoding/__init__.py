"""What a decoder reads beside its own text."""
