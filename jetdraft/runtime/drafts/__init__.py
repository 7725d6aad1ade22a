"""Plain data: rows of a draft, distributions, noise and probes."""
