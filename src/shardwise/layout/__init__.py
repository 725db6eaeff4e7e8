"""Layouts: their degrees and choices, their placement, and which are legal."""
