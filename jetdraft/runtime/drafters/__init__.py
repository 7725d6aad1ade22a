"""What is kept of a drafter: the rows in its buffers, and weights learned from use."""
