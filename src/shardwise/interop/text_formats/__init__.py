"""Texts that options are written in: command lines, YAML, TOML, JSON and calls of Python. Nothing that is read is run."""
