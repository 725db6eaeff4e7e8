"""Price every legal layout of a job with NumPy arrays, and keep the best. Entry point: `search_layouts.search_layouts`.

Candidates are factorisations of the devices over the axes times the discrete choices. Tables hold the costs of units on unique
keys; a block of candidates gathers its rows from them. Priced arrays have the shape [ZeRO stage, candidate]: a line for each ZeRO
stage, a column for each candidate on one of its placements.

May import what `search` may, and nothing of `search` outside this folder."""
