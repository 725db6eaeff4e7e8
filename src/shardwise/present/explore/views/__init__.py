"""One file for each view: a pure function of what was asked to the payload that the page draws.

A view has the payload of the command that prints the same numbers with `--json`, under that command's name.
"""
