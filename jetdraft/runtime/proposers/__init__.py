"""Proposers: where drafts come from. A new method is a new module here."""
