"""Texts that options are written in: command lines, YAML, TOML, JSON and Python configs. Nothing that is read is run.

`config_trees` has YAML, TOML and JSON, `command_flags` options on a command line, `shell_script` the training command of a
script, `python_config` configs in Python. Imports `launches.target`; never PyTorch.
"""
