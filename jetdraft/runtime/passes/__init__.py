"""Runs one pass of one graph: sessions, bindings, KV buffers."""
