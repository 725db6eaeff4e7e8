"""Weights of a run in the names and shapes of other frameworks: what their formats have in common."""
