"""Predictions held against measurements: how far off the estimate is, where, and on which side."""
