"""The formats of logs by name. A new one is a file beside this, and a line here."""

from __future__ import annotations

from collections.abc import Mapping

from shardwise.measurement.logs import automodel, maxtext, megatron, nanotron, nemo, shardwise, torchtitan
from shardwise.measurement.logs.logged import LogFormat

FORMATS: Mapping[str, LogFormat] = {
    one.FORMAT.name: one.FORMAT for one in (torchtitan, megatron, nemo, automodel, nanotron, maxtext, shardwise)
}
