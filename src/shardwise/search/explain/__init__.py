"""Explanations of a plan: does it fit, does it reach the batch, what bounds its throughput, what was left out and by how
much.

Entry point: `explanation.explain_plan`, which returns an `Explanation`. `playbook_steps` has the three steps of the playbook's
decision procedure, `other_layouts` and `neighbour_layouts` the alternatives, `constant_sensitivity` the measured constants that
move the step most. Sentences on pairs of layouts are in `search/verdicts.py`."""
