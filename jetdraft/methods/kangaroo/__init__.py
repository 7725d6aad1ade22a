"""Kangaroo (2404.18911): the lower layers of the target and an adapter."""
