"""Runs at several batches, each with a learning rate of its own, to one loss."""
