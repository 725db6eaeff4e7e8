"""Type of one value of a catalogue with its source, as `shardwise show` lists it.

Lists of them are built beside the values that they describe, and printed by `present/pictures/catalogue/sourced_entries.py`.
"""

from typing import Any

SourcedValue = tuple[str, Any, str]  # name, value, source; None and "": there is no source for it
