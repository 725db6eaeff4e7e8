"""Runs of `train` side by side, in one folder: what sweeps over batches and branches of a checkpoint have in common."""
