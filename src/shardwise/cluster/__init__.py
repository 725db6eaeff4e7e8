"""Chips, clusters of them, their measurements, and the catalogue."""
