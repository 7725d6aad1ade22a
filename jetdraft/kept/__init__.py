"""What is kept of a model's use: SQLite files, lessons, and weights learned from them.

A running model and a training share these files, so both import this room.
"""
