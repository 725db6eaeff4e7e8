"""Predictions compared with measured runs, and constants of chips and stacks fitted to measurements.

`published_runs` reads runs that others published; `prediction_errors` and `layout_ranking` measure how far off
predictions are; `observations` prices a measurement at any constants; `constant_fit` finds the constants,
and predicts runs that were left out. Entry points: `published_fit.fit_published` fits the constants that
the package ships, `cluster_calibration.fit_user_cluster` those of a user's cluster. May import `run`, `search` and all
rooms below.
"""
