"""Architectures, their programs, and the programs derived from these."""
