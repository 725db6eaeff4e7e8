"""Predictions held against published runs, and the constants of chips and stacks that measurements give.

`accuracy` says how far off the estimate is, where, and on which side; `response` prices an observation at given constants, `fit`
finds the constants, `folds` says how good predictions are where they were not fitted, `record` writes what was found.
"""
