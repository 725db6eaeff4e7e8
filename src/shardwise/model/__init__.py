"""Architectures, the programs they are made of, and the programs derived from these."""
