"""Recipes that make drafters and streams; torch lives here and in export."""
