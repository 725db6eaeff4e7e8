"""Derived programs on virtual devices in NumPy, which counts what moves. Nothing here imports torch."""
