"""Text to token shards, and token shards to the sequences of each step.

Entry points: `corpus_writer.write_corpus`, `token_shards.TokenShards`, `batches.Batches`. Imports `values`,
`batch_size`, NumPy and `tokenizers` only, no framework.
"""
