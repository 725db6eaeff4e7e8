"""Executes derived programs."""
