"""Reading checkpoints: Hugging Face folders, packed weights and streams."""
