"""Shapes of draft trees: a new one is a new module here."""
