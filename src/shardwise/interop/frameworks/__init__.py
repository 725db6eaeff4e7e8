"""Frameworks that launches are written for and read from, one module or folder each, with their tables.

A module has the framework's `Target`: mappings between fields of a launch and options, requirements, and functions that write
and read its files. Weight tables (`weight_table.WeightTable`) say under which tensor names a framework keeps the weights of a
model, and `weight_table.SupportedModels` which models its code computes. `options/` has the options of each release with their
types.

`targets.TARGETS` has all targets by name. Imports `launches` and `text_formats`; never PyTorch.
"""
