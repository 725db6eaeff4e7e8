"""What this machine reaches in training a small model: measured operation by operation, fitted, written as a cluster file.

`samples` says at which sizes, `operations` has what is run, `measure` runs it in all processes at once, and `fit` makes the
constants of a calibration of it. Only operations and `measure` need torch.
"""
