"""Number formats of DeepSpeed's configuration, as recipes of `precision.py`, and what of it no plan has a price for.

Source: DeepSpeed 0.19.8, runtime/engine.py: get_data_types, communication_data_type, _do_optimizer_sanity_check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from shardwise.errors import InputError, require
from shardwise.export.field import Field, Given, Options
from shardwise.export.launch import Launch
from shardwise.export.scripts import PREFIX, is_true


class Formats(NamedTuple):
    """Of weights, of gradients as they are reduced and as they add up; `kept`: the weights' own gradients stay beside sums."""

    weights: str
    reduced: str
    added: str
    kept: bool = False


# ZeRO-1 with sums in fp32 has an optimizer of its own (BF16_Optimizer), which keeps both copies of the gradients until the step,
# unless it is set to add each up at once; other stages keep the sums alone.
PRECISIONS: Mapping[str, Formats] = {
    "bf16": Formats("bf16", "bf16", "bf16"),
    "bf16_fp32_reduction": Formats("bf16", "fp32", "bf16"),
    "bf16_fp32_gradients": Formats("bf16", "fp32", "fp32", kept=True),
    "bf16_fp32_main_gradients": Formats("bf16", "fp32", "fp32"),
    "fp16_fp32_update": Formats("fp16", "fp16", "fp16"),
    "fp32": Formats("fp32", "fp32", "fp32"),
}
NAMES = {
    "fp32": ("fp32", "float32"),
    "bf16": ("bf16", "bfp16", "bfloat16"),
    "fp16": ("fp16", "half", "float16"),
}  # DtypeEnum's
# Options that change what a step takes and holds and that no plan says, with the values that leave it as it is.
UNPRICED: Mapping[str, tuple[Any, ...]] = {
    "zero_optimization.zero_hpz_partition_size": (0, 1),
    "zero_optimization.zero_quantized_weights": (False,),
    "zero_optimization.zero_quantized_gradients": (False,),
    "zero_optimization.zero_quantized_nontrainable_weights": (False,),
    "zero_optimization.offload_param.device": ("none",),
    "zero_optimization.cpu_offload_param": (False,),
    "zero_optimization.offload_optimizer.ratio": (1, 1.0),
    "zero_optimization.offload_optimizer.super_offload": (False,),
    "zero_optimization.mics_shard_size": (-1,),
    "torch_autocast.enabled": (False,),
    "bf16.bf16_master_weights_and_grads": (False,),
    "bf16.bf16_optimizer_states": (False,),
    "fp16.fp16_master_weights_and_grads": (False,),
    "compile.deepcompile": (False,),
    "hybrid_engine.enabled": (False,),
}


def require_priced(given: Given) -> Mapping[str, Any]:
    """No parts. Raises `InputError` for options that no plan says and whose cost is not known."""
    found = {
        name: given.get(name) for name, harmless in UNPRICED.items() if given.get(name, harmless[0]) not in harmless
    }
    found |= {name: given.get(name) for name in given.options if name.startswith("zero_optimization.zenflow.")}
    require(
        [
            f"{name}: found {value!r}, whose cost is not known and which no layout says; leave it out"
            for name, value in found.items()
        ]
    )
    return {}


def _reduction(launch: Launch) -> tuple[str, str | None]:
    """The option that says what gradients are reduced in, and its default: another one with Ulysses."""
    if launch.layout.cp > 1:
        return "seq_parallel_communication_data_type", "fp32"
    return "communication_data_type", None


def _say(launch: Launch) -> Options:
    formats = PRECISIONS.get(launch.job.precision)
    if formats is None:
        return {}
    option, usual = _reduction(launch)
    options: dict[str, Any] = {} if formats.weights == "fp32" else {f"{formats.weights}.enabled": True}
    if formats.reduced != (usual or formats.weights):
        options[option] = formats.reduced
    if formats.added != formats.weights:
        options["data_types.grad_accum_dtype"] = formats.added
        if _keeps_both(launch.layout.zero_stage, launch.layout.offloads_optimizer) and not formats.kept:
            options["bf16.immediate_grad_update"] = True
    return options


def _keeps_both(stage: int, offloaded: bool) -> bool:
    return stage == 1 and not offloaded


def adds_as_it_rests(precision: str) -> bool:
    """Whether gradients add up in the format of the weights; so it is for a precision that DeepSpeed does not have."""
    formats = PRECISIONS.get(precision)
    return formats is None or formats.added == formats.weights


def enabled(given: Given, name: str) -> bool:
    """Whether a format is; bfloat16 is an old name."""
    given.get(PREFIX + name)  # what "auto" stands for
    return is_true(given.get(f"{name}.enabled", given.get("bfloat16.enabled", False) if name == "bf16" else False))


def _hear(given: Given) -> Mapping[str, Any]:
    chosen = [name for name in ("bf16", "fp16") if enabled(given, name)]
    if len(chosen) > 1:
        raise InputError("bf16.enabled, fp16.enabled: both are true; one format is required")
    weights = chosen[0] if chosen else "fp32"
    parallel = given.get("sequence_parallel_size", 1) > 1
    option, usual = (
        ("seq_parallel_communication_data_type", "fp32") if parallel else ("communication_data_type", weights)
    )
    reduced, added = (
        _format(given, name, alone) for name, alone in ((option, usual), ("data_types.grad_accum_dtype", weights))
    )
    own = _keeps_both(given.get("zero_optimization.stage", 0), offloads_optimizer(given))
    at_once = is_true(given.get("bf16.immediate_grad_update", False))
    found = Formats(weights, reduced, added, kept=own and added != weights and not at_once)
    name = next((name for name, formats in PRECISIONS.items() if formats == found), None)
    if name is None:
        raise InputError(
            f"number formats: found {weights} weights, gradients reduced in {reduced} and added up in {added}, which no recipe "
            f"has; set {option} and data_types.grad_accum_dtype to the same, or leave them out"
        )
    return {"job.precision": name}


def _format(given: Given, option: str, usual: str) -> str:
    value = given.get(option) or usual
    found = next((name for name, spelt in NAMES.items() if value in spelt), None)
    if found is None:
        raise InputError(f"{option}: found {value!r}; one of {', '.join(NAMES)} is required")
    return found


def offloads_optimizer(given: Given) -> bool:
    """Whether moments and master weights rest on the host. Raises `InputError` for those that rest on a disk."""
    device = given.get("zero_optimization.offload_optimizer.device", "none")
    if device not in ("none", "cpu"):
        raise InputError(
            f"zero_optimization.offload_optimizer.device: found {device!r}; none or cpu is what can be read"
        )
    return device == "cpu" or is_true(given.get("zero_optimization.cpu_offload", False))


FORMATS = Field(_say, _hear)
PRICED = Field(lambda launch: {}, require_priced)
