"""Which layouts can run at all.

Each rule states its requirement and the fix, for numbers or for columns of a search. `legality` has the rules of a model, a
job and a cluster; `table` applies them: `violations` and `require_legal` to one layout, `legal_modes` to columns of
degrees."""
