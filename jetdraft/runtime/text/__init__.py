"""Text and tokens: codec, prompt, stops, constraints, chat templates."""
