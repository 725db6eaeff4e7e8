"""All serving engines by name."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.interop.serving import sglang, trtllm, vllm
from shardwise.interop.serving.engine import Engine
from shardwise.values import lookup

ENGINES: Mapping[str, Engine] = {engine.name: engine for engine in (vllm.ENGINE, sglang.ENGINE, trtllm.ENGINE)}


def get_engine(name: str) -> Engine:
    """Return an engine by name. Raises `InputError` that lists the names."""
    return lookup(ENGINES, name, "engine")
