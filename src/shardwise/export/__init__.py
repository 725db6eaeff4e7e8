"""Launches of other frameworks: a plan as the configuration that a framework takes, and such a configuration as a layout.

`launch` is the value in the middle, `field` says how one part of it reads in a target's options, `target` what a target is, and
each file named after a target has its fields and rules; `saying`, `exporting` and `reading` are the same for all of them.
"""
