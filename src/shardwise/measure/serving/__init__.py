"""Serving configurations that others measured (`serving_rows.csv`), the constants fitted to them, and predictions of them.

`serving_rows` reads rows of loads, `batch_rows` those of single batches (`batch_rows.csv`), `row_stack` makes one table of all of
an engine, `serving_fit` fits constants and leaves groups out in turn, `serving_validation` compares predictions with what was
measured and picks configurations under limits; `pool_validation` and `throughput_validation` have rows that no constant is fitted
to. May import `serve` and below.
"""
