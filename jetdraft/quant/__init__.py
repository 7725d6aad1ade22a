"""Weight quantization: algorithms, calibration on a text, and edits of step graphs."""
