"""The random products of the benchmarks are the tests' too."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")

sys.path.insert(0, BENCHMARKS)
for name in ("random_expressions", "expressions"):
    importlib.import_module(name)
sys.path.remove(BENCHMARKS)  # others of them have the names of the tests' own folders
