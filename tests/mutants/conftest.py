"""The command that is tested lies beside the other benchmarks."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")

sys.path.insert(0, BENCHMARKS)
for name in ("mutation", "mutant_rooms", "mutant_tree", "mutants"):
    importlib.import_module(name)
sys.path.remove(BENCHMARKS)  # others of them have the names of the tests' own folders
