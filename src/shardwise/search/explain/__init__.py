"""Why a plan is what it is: does it fit, does it reach the batch, what bounds its throughput, what was left out and by how much.

Entry point: `explanation.explain_plan`, which gives an `Explanation`. `playbook_steps` has the three steps of the playbook's
decision procedure, `other_layouts` and `neighbour_layouts` what else could have been done, `constant_sensitivity` which measured
constant moves the step the most. Sentences on pairs of layouts are in `search/verdicts.py`.
"""
