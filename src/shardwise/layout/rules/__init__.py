"""Rules that decide which layouts can run.

Each rule has a requirement and explains the fix, for numbers or for columns of a search. `legality` has the rules of a model,
a job and a cluster, `stack_abilities` those of a software stack, `engine` those of `train`. `table` applies the first:
`violations` and `require_legal` to one layout, `legal_modes` to columns of degrees.
"""
