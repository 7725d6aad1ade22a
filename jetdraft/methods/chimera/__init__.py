"""Chimera (2402.15758): three tokens, and a layer over the states of the target."""
