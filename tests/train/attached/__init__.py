"""Drafters that are attached to a target: their training, their drafts."""
