"""Experiments: many runs that are predicted first, started where they may matter, and recorded in a ledger.

`ledger` holds what has happened to each configuration, `run_experiment` goes on with an experiment until its best configurations
are known, `summarise_ledger` says how far it is, and `collect_results` gives the tables of its report.
"""
