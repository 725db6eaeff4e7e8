"""Variables of the environment that a serving engine is started in, and what they change."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

from shardwise.interop.serving.engine import Engine
from shardwise.interop.text_formats.option_tables import read_option_file

# Variables of libraries that set how quickly collectives and kernels run.
LIBRARY_PREFIXES = (
    "NCCL_",
    "RCCL_",
    "FLASHINFER_",
    "TRITON_",
    "TORCHINDUCTOR_",
    "CUBLAS_",
    "NVSHMEM_",
    "DEEP_GEMM_",
    "DG_",
)


class EnvironmentVariable(NamedTuple):
    """A variable by a pattern of its name: what it changes without being priced, unless its value is a harmless one."""

    pattern: str
    effect: str
    harmless: tuple[str, ...]


@cache
def _variables() -> tuple[EnvironmentVariable, ...]:
    rows = csv.DictReader(read_option_file("serving_environment.csv").splitlines())
    return tuple(
        EnvironmentVariable(row["pattern"], row["effect"], tuple(filter(None, row["harmless"].split("|"))))
        for row in rows
    )


def environment_effects(engine: Engine, environment: Mapping[str, str]) -> tuple[Mapping[str, str], list[str]]:
    """Return what variables change without being priced, and notes on those of the engine that are not known here."""
    effects: dict[str, str] = {}
    unknown: list[str] = []
    for name, value in environment.items():
        variable = next((entry for entry in _variables() if re.fullmatch(entry.pattern, name)), None)
        if variable is not None:
            if variable.effect != "none" and value.lower() not in ("", "0", "false", *variable.harmless):
                effects[name] = variable.effect
        elif name.startswith((engine.environment, "SGL_", "TLLM_", *LIBRARY_PREFIXES)):
            effects[name] = "time"
            unknown.append(name)
    notes = [f"{', '.join(unknown)}: not known here, and taken to change the time"] if unknown else []
    return effects, notes
