"""Prompt lookup: a draft is what followed the last time the text ended like this."""
