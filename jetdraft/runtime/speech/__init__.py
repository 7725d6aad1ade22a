"""Transcribes sounds: spectrum, rules of what may be written, segments."""
