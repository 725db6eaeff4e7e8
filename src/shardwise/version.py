"""The version of this package, as it was installed; a module of its own, as reading it takes longer than importing the rest."""

from importlib import metadata

try:
    __version__ = metadata.version("shardwise")
except metadata.PackageNotFoundError:  # a source tree that was not installed
    __version__ = "0+unknown"
