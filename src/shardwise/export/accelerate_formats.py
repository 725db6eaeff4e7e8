"""Mixed precision of Accelerate as recipes of `precision.py`.

With mixed precision FSDP's weights rest in fp32 and are gathered and reduced in the 16 bits that they are used in
(utils/fsdp_utils.py, fsdp2_prepare_model; utils/dataclasses.py, set_mixed_precision): as many bytes as bf16 weights with an fp32
master copy. Plain replicas are torch's DistributedDataParallel, which reduces the gradients of fp32 weights as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.accelerate_sharding import KIND
from shardwise.export.field import Field, Given, Options
from shardwise.export.launch import Launch
from shardwise.export.scripts import is_true

MIXED, EIGHT = "mixed_precision", "fp8_config.fp8_"
GATHERED = f"{EIGHT}enable_fsdp_float8_all_gather"
SHARDED: Mapping[str, Options] = {
    "bf16": {MIXED: "bf16"},
    "fp32": {MIXED: "no"},
    "fp8_torchao": {MIXED: "fp8", f"{EIGHT}backend": "ao", GATHERED: True},
}
REPLICATED: Mapping[str, Options] = {"bf16_fp32_reduction": {MIXED: "bf16"}, "fp32": {MIXED: "no"}}


def _table(sharded: bool) -> Mapping[str, Options]:
    return SHARDED if sharded else REPLICATED


def _say(launch: Launch) -> Options:
    return _table(launch.layout.zero_stage > 0).get(launch.job.precision, {})


def _hear(given: Given) -> Mapping[str, Any]:
    """What the formats of either table say; the backend of fp8 is torchao's where it is named so."""
    value = given.get(MIXED, "no")
    said: dict[str, Any] = {MIXED: value}
    if value == "fp8":
        said |= {
            f"{EIGHT}backend": given.get(f"{EIGHT}backend"),
            GATHERED: is_true(given.get(GATHERED, True)),
        }
    table = _table(given.get(KIND) == "FSDP")
    name = next((name for name, options in table.items() if options == said), None)
    if name is None:
        found = ", ".join(f"{option.rpartition('.')[2]} {one}" for option, one in said.items())
        raise InputError(
            f"{MIXED}: found {found}; one of bf16, no and, with FSDP, fp8 by AO with its own gathers, can be read"
        )
    return {"job.precision": name}


FORMATS = Field(_say, _hear)
