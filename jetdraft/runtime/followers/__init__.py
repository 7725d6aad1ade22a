"""The graphs of drafters, kept in step with the sequence."""
