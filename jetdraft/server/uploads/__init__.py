"""Requests that come with a file."""
