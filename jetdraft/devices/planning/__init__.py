"""Predicts memory and speed of a model on a device that is not at hand."""
