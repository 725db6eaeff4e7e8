"""How the keys of a recipe of NeMo Automodel say a model and a job.

Source of names and types: nemo-automodel 0.7.0, recipes/llm, components/loss, components/quantization/fp8.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.automodel_layout import LAYOUT, OWN, all_replicas, number
from shardwise.export.field import Field, Given, Options, beside, named
from shardwise.export.hub import hub_name
from shardwise.export.launch import Launch

POLICY = f"{OWN}.mp_policy"
DTYPES = (f"{POLICY}.param_dtype", f"{POLICY}.reduce_dtype")
NAMES = ("model.config.pretrained_model_name_or_path", "model.pretrained_model_name_or_path")
LOSSES = {
    "unfused": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
    "fused": "nemo_automodel.components.loss.te_parallel_ce.TEParallelCrossEntropy",
    "chunked": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy",
}
# Of fp32 weights, computed in bf16: gradients are reduced in one or the other. Weights stored in bf16 have no master (components/
# distributed/config.py, FSDP2Config.mp_policy).
REDUCED = {"bf16_fp32_reduction": "float32", "bf16": "bfloat16"}
FP8 = {"fp8_torchao": "tensorwise", "fp8_torchao_rowwise": "rowwise"}
FLOATS = {"float32": "float32", "fp32": "float32", "torch.float32": "float32", "float": "float32"}


def _said_model(launch: Launch) -> Options:
    return {"model._target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "model.config._target_": "transformers.AutoConfig.from_pretrained",
            NAMES[0]: hub_name(launch.model) or ""}  # fmt: skip


def _batches(launch: Launch) -> Options:
    """Sequences that a replica takes at once: one micro-batch, or with stages all that go through them before the update."""
    layout, seqs = launch.layout, launch.job.num_seqs
    local = seqs // (layout.dp * layout.fsdp) if layout.pp > 1 else layout.micro_batch_seqs
    return {
        "step_scheduler.global_batch_size": seqs,
        "step_scheduler.local_batch_size": local,
        "dataset.batch_size": local,
    }


def _heard_batches(given: Given) -> Mapping[str, Any]:
    seqs, local = (
        number(given, "step_scheduler.global_batch_size", 32),
        number(given, "step_scheduler.local_batch_size"),
    )
    given.get("dataset.batch_size")
    if number(given, f"{OWN}.pp_size") == 1:
        return {"job.global_batch_seqs": seqs, "layout.micro_batch_seqs": local}
    replicas = all_replicas(given)
    if seqs != local * replicas:
        raise InputError(
            f"step_scheduler: global_batch_size = {seqs} with local_batch_size = {local} of {replicas} replicas fills the "
            f"pipeline {seqs / (local * replicas):g} times for an update; once is what can be read"
        )
    return {
        "job.global_batch_seqs": seqs,
        "layout.micro_batch_seqs": number(given, f"{OWN}.pipeline.pp_microbatch_size"),
    }


def _precision(launch: Launch) -> Options:
    precision = launch.job.precision
    recipe = {"fp8.enabled": True, "fp8.recipe_name": FP8[precision]} if precision in FP8 else {}
    gathered = {"fp8.enable_fsdp_float8_all_gather": True} if precision == "fp8_torchao" else {}
    policy = {f"{POLICY}._target_": "torch.distributed.fsdp.MixedPrecisionPolicy", f"{POLICY}.param_dtype": "bfloat16",
              f"{POLICY}.reduce_dtype": REDUCED.get(precision, "float32")}  # fmt: skip
    return {"model.torch_dtype": "float32", **(policy if launch.layout.zero_stage else {}), **recipe, **gathered}


def _heard_precision(given: Given) -> Mapping[str, Any]:
    """Weights stored in bf16 have moments in bf16 too, which is named: what keeps them in fp32 is nearest."""
    names = {recipe: ours for ours, recipe in FP8.items()}
    if given.get("fp8.enabled", False) and given.get("fp8.recipe_name", "tensorwise") in names:
        for name in (
            "model.torch_dtype",
            "fp8.enable_fsdp_float8_all_gather",
            *(f"{OWN}.mp_policy.{one}_dtype" for one in ("param", "reduce")),
        ):
            given.get(name)
        return {"job.precision": names[given.get("fp8.recipe_name", "tensorwise")]}
    if str(given.options.get("model.torch_dtype", "")) not in FLOATS:
        return {"job.precision": "bf16_no_master"}
    given.get("model.torch_dtype")
    _, reduced = (given.get(name, "float32") for name in DTYPES)
    reduced = str(reduced).removeprefix("torch.")
    return {"job.precision": "bf16" if reduced in ("bfloat16", "bf16") else "bf16_fp32_reduction"}


def _heard_length(given: Given) -> Mapping[str, Any]:
    names = ("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length")
    found = [given.get(name) for name in names]
    length = next((one for one in found if isinstance(one, int) and one > 0), None)
    if length is None:
        raise InputError("dataset.seq_len: found none; the length of a sequence is required")
    return {"job.seq_len": length}


def _steps(launch: Launch) -> Options:
    job = launch.job
    return {"step_scheduler.max_steps": max(round(job.tokens / job.global_batch_tokens), 1)} if job.tokens else {}


def _heard_steps(given: Given) -> Mapping[str, Any]:
    steps = given.get("step_scheduler.max_steps")
    seqs, length = number(given, "step_scheduler.global_batch_size", 32), _heard_length(given)["job.seq_len"]
    return {"job.tokens": float(steps * seqs * length)} if steps else {}


FIELDS: tuple[Field, ...] = (
    beside("model._target_", "model.config._target_", *NAMES, say=_said_model),
    Field(_precision, _heard_precision),
    *LAYOUT,
    Field(_batches, _heard_batches),
    Field(lambda launch: {"dataset.seq_len": launch.job.seq_len}, _heard_length),
    Field(_steps, _heard_steps),
    named("job.loss", "loss_fn._target_", LOSSES),
    named("job.optimizer", "optimizer._target_", {"adamw": "torch.optim.AdamW"}),
)  # fmt: skip
