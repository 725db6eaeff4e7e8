"""Branches of a run's checkpoint, each with a batch of its own, over the same samples."""
