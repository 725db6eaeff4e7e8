"""The type of one value of a catalogue with its source, as `shardwise show` lists it: a name, the value, and where it is from.

Lists of them are made beside the values that they describe, and printed by `present/pictures/catalogue/sourced_entries.py`.
"""

from typing import Any

SourcedValue = tuple[str, Any, str]  # name, value, source; None and "": there is no source for it
