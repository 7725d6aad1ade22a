"""Drafts from guesses of several tokens at once."""
