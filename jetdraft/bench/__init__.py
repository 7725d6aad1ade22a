"""Measurements for people: bench, equality of texts, the recipes report, energy."""
