"""Drafts are responses to similar requests, out of a store."""
