"""Drafters that are attached to a part of the target."""
