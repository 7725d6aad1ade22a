"""A table of the tokens that follow two tokens, learned on the way."""
