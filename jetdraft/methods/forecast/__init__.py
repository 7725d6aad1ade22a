"""Forecasts of the target, which see a learned prefix."""
