"""Chips, their networks and the catalogue of both."""
