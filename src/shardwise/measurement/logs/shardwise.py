"""Our own: `log.jsonl` in the folder of a run of `shardwise train`, and its TensorBoard (`measurement.log`)."""

from __future__ import annotations

from shardwise.measurement.log import INSPECTED
from shardwise.measurement.logs.logged import LogFormat, Tag
from shardwise.measurement.logs.torchtitan import TAGS

# Memory is that of a GPU; of a CPU there is the whole process, with its interpreter, under another name.
FORMAT = LogFormat(
    name="shardwise", title="shardwise train", source="shardwise, measurement/log.py",
    tags={**TAGS, "num_tokens": Tag("batch_tokens")}, telling="num_tokens", untimed=INSPECTED,
)  # fmt: skip
