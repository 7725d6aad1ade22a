"""Weight quantization of step graphs."""
