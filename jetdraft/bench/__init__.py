"""Measurements for people: methods, equality of texts, recipes, energy."""
