"""Optimizers, one file each, called as jobs name it.

`definition` says what an optimizer is, and finds the files of this folder that have an `OPTIMIZER`. Jobs, prices,
recipes, engines and help read that table.
"""
