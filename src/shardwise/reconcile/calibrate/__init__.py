"""Constants of chips and stacks from measurements: `response` prices an observation at given constants, `fit` finds the
constants, `folds` says how good predictions are where they were not fitted, `record` writes what was found."""
