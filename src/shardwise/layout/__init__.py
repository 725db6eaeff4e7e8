"""Layouts: their degrees and choices, where they are placed, and which are legal."""
