"""Rules that decide which layouts can run.

A `LayoutRule` has a requirement and explains the fix, for one layout or for columns of a search. `legality` has the rules of a
model, a job and a cluster, `stack_abilities` those of a software stack, `engine` those of `train`; `table.layout_rules` is one
table of all. `violations` and `require_legal` apply legality to one layout, `legal_modes` to columns of degrees.
"""
