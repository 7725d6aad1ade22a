"""Reading checkpoints: Hugging Face folders, packed weights, streams."""
