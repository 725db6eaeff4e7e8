"""Launches of training runs as values: written for a framework, read from its files, priced.

`launch.Launch` is the value in the middle; `target.Target` describes a framework and how fields of a launch map to its
options; `translate_launch` translates a launch to options and back for any target. `export_launch` writes the files of a plan,
`interop.read_launch` reads files, and prices what was read. The targets themselves are in `interop.frameworks`.
"""
