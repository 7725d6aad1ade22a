"""A target in two halves, and what the host does between them."""
