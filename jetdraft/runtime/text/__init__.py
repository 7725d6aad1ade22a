"""Between text and tokens: codec, prompt, stops, constraint, template."""
