"""Speculative Streaming (2402.11131): the target drafts in the pass that verifies."""
