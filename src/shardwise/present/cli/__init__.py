"""Verbs that are still modules of their own."""
