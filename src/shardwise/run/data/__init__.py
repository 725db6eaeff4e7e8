"""Text to token shards, and token shards to the sequences of each step. NumPy and `tokenizers` only: no framework."""
