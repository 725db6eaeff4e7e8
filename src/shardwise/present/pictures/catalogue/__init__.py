"""Entries of the catalogues as lists of values, each with its source: what `shardwise show` lists.

`sourced_entries` makes the JSON; the other files list the values of chips, clusters, models, stacks and export targets.
"""
