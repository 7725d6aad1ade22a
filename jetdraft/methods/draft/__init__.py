"""Speculative decoding with a drafter, a small model (2211.17192, 2302.01318)."""
