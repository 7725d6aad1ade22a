"""The target itself drafts, and reads only selected rows of its KV buffers."""
