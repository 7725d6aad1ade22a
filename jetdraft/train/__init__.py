"""The trainers of streams, of heads and of tables."""
