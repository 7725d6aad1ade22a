"""Rewrites of a traced graph that save nodes."""
