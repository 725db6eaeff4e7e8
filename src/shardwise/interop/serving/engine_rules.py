"""Rules that engines share, and number formats read from options and from the names of checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardwise.derive.inference_unit import Dispatch
from shardwise.interop.serving.checkpoints import Checkpoint, identify_checkpoint, weight_formats
from shardwise.interop.serving.engine import EngineOptions
from shardwise.interop.serving.serving_launch import ServingLaunch
from shardwise.serve import ServingFormats, draft_problems, get_serving_engine, serving_layout_problems


def model_rules(launch: ServingLaunch) -> Iterator[str]:
    """Yield what the model itself excludes: layouts that it does not allow, and tokens drafted without modules that draft."""
    architecture, limits = launch.architecture, launch.batch_limits
    if architecture is None:
        return
    yield from serving_layout_problems(architecture, launch.layout, launch.formats)
    yield from get_serving_engine(launch.engine).form_problems(launch.layout)
    yield from draft_problems(architecture, limits.mtp_tokens)


def read_formats(
    reader: EngineOptions, checkpoint: Checkpoint, cache: str, method_formats: Mapping[str, str]
) -> ServingFormats:
    """Return the formats of a checkpoint, of the option `quantization` where its name says none, and of the cache."""
    method = reader.get("quantization")
    formats = checkpoint.formats
    if method is not None and not checkpoint.says_format:
        if str(method) in method_formats:
            formats = ServingFormats(weights=method_formats[str(method)])
        else:
            reader.flag_unpriced("quantization", "memory")
            reader.notes.append(
                f"quantization {method}: what it makes of this checkpoint is not known, so 16 bits are shown"
            )
    elif checkpoint.says_format or checkpoint.architecture is None:
        reader.notes.append(f"formats: {formats}, {checkpoint.evidence}")
    else:
        reader.notes.append("formats: " + checkpoint.evidence)
    return replace(formats, cache=cache)


def read_cache_format(reader: EngineOptions, option: str, names: Mapping[str, str]) -> str:
    """Return the format of the cache; one that is not priced is recorded, and shown as 16 bits."""
    value = str(reader.get(option, "auto"))
    if value not in names:
        reader.flag_unpriced(option, "memory")
    return names.get(value, "bf16")


def flag_other_drafter(reader: EngineOptions, option: str) -> int:
    """Record a drafter that is not the model's own as not priced, and return the tokens that the model itself drafts: none."""
    reader.flag_unpriced(option, "memory")
    reader.notes.append(f"{option}: the drafter is not priced; latencies are those without drafted tokens")
    return 0


def quantization_option(launch: ServingLaunch, methods: Mapping[str, str]) -> Mapping[str, str]:
    """Return the option that quantizes a checkpoint as it is loaded, where its name does not say the formats already."""
    checkpoint = identify_checkpoint(launch.checkpoint)
    if checkpoint.says_format or weight_formats(checkpoint.formats) == weight_formats(launch.formats):
        return {}
    named = set(weight_formats(launch.formats).values())
    method = methods.get(launch.formats.weights) if len(named) == 1 else None
    return {} if method is None else {"quantization": method}


def read_dtype(reader: EngineOptions) -> None:
    """Read the option `dtype`; formats of 16 bits are priced alike, and another one is recorded."""
    if str(reader.get("dtype", "auto")) not in ("auto", "bfloat16", "half", "float16"):
        reader.flag_unpriced("dtype", "memory")


def read_dispatch(reader: EngineOptions, option: str, gathering: Sequence[str]) -> Dispatch:
    """Return how tokens reach their experts: a backend of an option that is none of those that gather sends them."""
    value = str(reader.get(option, gathering[0]))
    return "all_gather" if value in gathering else "all_to_all"
