"""Chips, clusters of them, what was measured of both, and the catalogue."""
