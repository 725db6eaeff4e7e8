"""Floating-point formats: what they hold, rounding to them, and quantisation with scales. NumPy alone."""
