"""Falcon (2412.12639): a head that drafts several tokens in a pass."""
