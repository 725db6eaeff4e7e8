"""From a row's batch, number format and degrees to a `Job` and a `Layout`.

What sources leave out is filled by a stated prior, each with its reason:

- number format: bf16, every framework's default since 2022
- FSDP over all devices where that alone is stated of the layout, MaxText's default (`ici_fsdp_parallelism: -1`)
- micro-batch: one sequence with tp, cp or pp > 1, as in 326 of the 345 runs of Megatron and NeMo that have one of them and say
- cp and ep: 1, as tables leave out axes that are not used
- ZeRO stage: 3 with FSDP, else 1: distributed optimizers are the default of NeMo and Megatron Bridge, whose tables do not say
- splitting experts over tp: not, as in NVIDIA's recipes: whole experts, for which tp lends its devices
- sequence parallelism: with tp > 1, unless the row denies it; default of the same stacks, and of torchtitan
- asynchronous tensor parallelism: where the row says so, or the stack always has it (`Stack.overlaps_tp`)
- virtual stages: `typical_virtual_stages`; read as one, public pipelines come out a sixth too slow
- recompute: the least that fits, by our memory model, as recomputing more than memory asks for only costs time: none, or
  selective, or full, and that for as few layers of each stage as do (full, where a row says that every n-th block is)
- "selective" recompute: ours, or all where ours takes `REFUTED` of the memory, so that it cannot be what was run
- layers of a pipeline's stages: as many on each where they come out even, the default of Megatron and DeepSpeed; else the
  ends make room
- context parallelism: a zigzag ring, the default of Transformer Engine, which the stacks with cp > 1 use
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from shardwise.layout.layers_per_stage import MAX_EMPTY_STAGES
from shardwise.layout.layout import Layout
from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.recompute_policies import POLICIES
from shardwise.pipeline.registry import get_schedule, natural_schedule, schedule_names_by_alias
from shardwise.values.precision import PRECISIONS

# Above this part of the memory a recompute is refuted; below, the memory model may be wrong by that much.
REFUTED = 1.1
# Tokens of a document in fine-tuning runs, which pack many into a sequence: NVIDIA's recipes take SQuAD, a paragraph, a question
# and an answer of some 200 tokens together. Source: NVIDIA-NeMo/Megatron-Bridge, recipes for fine-tuning (default dataset).
FINE_TUNING_TOKENS = 256
# A row names torchtitan, or the nightly build of PyTorch that it ran with.
TORCHTITAN = r"torchtitan|^torch [0-9a-f]{7,}\b"
# Precision recipes by the sources' names for a format and what the software and the model say; the first line that fits, and
# of it the first recipe that there is: none skips the row. fp16 has the widths and the peak of bf16. NeMo scales fp8 with the
# maxima of earlier steps until 2025, Megatron Bridge with current ones; torchtitan casts with torchao.
PRECISION_RECIPES = (
    # BigScience, chronicles-prequel.md: fp16 until the BF16 optimizer, "just written to accumulate gradients in fp32"
    (r"fp16|fp16-or-bf16", r"deepspeed", ("fp16_fp32_update",)),
    (r"|bf16", r"deepspeed.*optimizer offload", ("bf16",)),  # the fp32 copy of the gradients rests on the host too
    (r"|bf16", r"deepspeed", ("bf16_fp32_gradients",)),
    (r"|bf16", r"bridge.*(moonlight|deepseek)", ("bf16_bf16_moments",)),
    (r"|bf16|fp16|fp16-or-bf16", r"", ("bf16",)),
    (r"fp32", r"", ("fp32",)),
    (r"fp8-rowwise", r"\btorch", ("fp8_torchao_rowwise",)),
    (r"fp8", TORCHTITAN, ("fp8_torchao", "fp8")),
    (r"fp8", r"bridge|nemo container", ("fp8_current", "fp8")),
    (r"fp8", r"", ("fp8_delayed", "fp8")),
    (r"mxfp8", r"", ("mxfp8",)),
    (r"nvfp4", r"", ("nvfp4",)),
    (r"int8.*", r"maxtext", ("int8_aqt",)),  # what its recipes for Trillium call fp8 sets quantization=int8
)
# Kinds of loss by what the software and the notes say, the first line that fits. XLA fuses the loss; llm-foundry and InternEvo
# take flash-attn's by default (llmfoundry/models/mpt/modeling_mpt.py, FlashGPTLMLoss), NeMo and Megatron Bridge Megatron's or
# Transformer Engine's (cross_entropy_loss_fusion). torchtitan's is eager until 2025 (train_utils: "compiling loss function
# causes CUDA errors, turning off for now"), and with tp it is PyTorch's loss_parallel.
LOSS_KINDS = (
    (r"liger", "chunked"),
    (r"maxtext|jax|pax|llm-foundry|internevo", "streamed"),
    (r"fused loss|bridge|nemo", "fused"),
    (r"torchtitan.* tp=(?!1$)", "unfused_parallel"),
    (r"", "unfused"),
)


@dataclass(frozen=True, slots=True)
class RowDegrees:
    """The product of a row's axes: replicas are what is left of the devices. `etp` is None without experts to split."""

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int | None
    replicas: int


def read_degrees(facts: RowCells, num_devices: int) -> RowDegrees:
    """Degrees that multiply out. Raises `SkippedRow` where the layout is not stated, or contradicts itself."""
    stated = {axis: facts.size(axis) for axis in ("tp", "cp", "pp", "ep", "dp")}
    if stated["tp"] is None and stated["pp"] is None and not facts.flag("fsdp"):
        raise SkippedRow("layout not stated", "tp, pp")
    tp, cp, pp, ep = (stated[axis] or 1 for axis in ("tp", "cp", "pp", "ep"))
    replicas = num_devices // (tp * cp * pp)
    if tp * cp * pp * replicas != num_devices or (stated["dp"] or replicas) != replicas:
        product = " x ".join(str(stated[axis] or 1) for axis in ("dp", "tp", "cp", "pp"))
        raise SkippedRow("degrees do not multiply out", f"{product} on {num_devices} devices")
    etp = (facts.size("etp") or 1) if ep > 1 and tp > 1 else None
    return RowDegrees(tp, cp, pp, ep, etp, replicas)


def read_job(facts: RowCells, degrees: RowDegrees) -> Job:
    """Batch, sequence and precision recipe of a row."""
    seq_len = facts.require_size("seq_len", "sequence length")
    seqs = facts.size("global_batch")
    if seqs is None:
        seqs = facts.require_size("micro_batch", "batch") * facts.require_size("grad_accum", "batch") * degrees.replicas
    return Job(
        global_batch_tokens=seqs * seq_len, seq_len=seq_len, precision=read_recipe(facts), loss=read_loss(facts),
        document_tokens=_document_tokens(facts, seq_len),
    )  # fmt: skip


def _document_tokens(facts: RowCells, seq_len: int) -> int | None:
    """Tokens of a document, where sequences are packed from them: in fine-tuning."""
    return min(FINE_TUNING_TOKENS, seq_len) if facts.text("task").lower() in ("sft", "lora") else None


def read_loss(facts: RowCells) -> str:
    """The kind of cross-entropy of a row."""
    text = f"{facts.text('software')} {facts.text('notes')} tp={facts.text('tp') or 1}".lower()
    return next(kind for stack, kind in LOSS_KINDS if re.search(stack, text))


def read_recipe(facts: RowCells) -> str:
    """The precision recipe of a row."""
    dtype = facts.text("dtype").lower()
    ran = " ".join(facts.text(column) for column in ("software", "model", "offload")).lower()
    known = (
        names for format_, what, names in PRECISION_RECIPES if re.fullmatch(format_, dtype) and re.search(what, ran)
    )
    recipe = next((name for name in next(known, ()) if name in PRECISIONS), None)
    if recipe is None:
        raise SkippedRow("no precision recipe", dtype[:40])
    if recipe == "bf16" and re.search(r"fp32 grad", facts.text("notes")):
        return "bf16_fp32_main_gradients"
    if recipe == "bf16" and (re.search(TORCHTITAN, ran) or "mixed precision" in facts.text("notes")):
        return "bf16_fp32_reduction"  # of llm-foundry: Composer's mixed_precision DEFAULT, where PURE reduces in bf16
    return recipe


def read_layout(
    facts: RowCells, degrees: RowDegrees, job: Job, architecture: Architecture, node: int, slices: int
) -> Layout:
    """The layout of a row, but for a recompute that it does not state: "none" then, see `read_recomputes`."""
    micro_batch = _micro_batch(facts, degrees, job)
    zero_stage, fsdp = _zero(facts, degrees, node, slices)
    parallel = degrees.tp > 1 and facts.flag("sp") is not False
    schedule, virtual = _pipeline(facts, degrees, job, architecture, micro_batch)
    flags = facts.text("overlap_flags").lower()
    return Layout(
        dp=degrees.replicas // fsdp, fsdp=fsdp, tp=degrees.tp, cp=degrees.cp, pp=degrees.pp, ep=degrees.ep, etp=degrees.etp,
        num_virtual_stages=virtual, layers_per_stage=even_stages(architecture.num_layers, degrees.pp, virtual),
        zero_stage=zero_stage, sequence_parallel=parallel,
        cp_variant="zigzag" if degrees.cp > 1 else "all_gather",
        async_tp=parallel and ("async tp" in flags or "tp-comm-overlap" in flags),
        micro_batch_seqs=micro_batch, recompute=read_recomputes(facts)[0], schedule=schedule, offload=_offload(facts),
    )  # fmt: skip


def even_stages(num_layers: int, pp: int, num_virtual_stages: int) -> tuple[int, ...] | None:
    """Equal numbers of layers on each stage, where they divide: the default of the frameworks."""
    even, rest = divmod(num_layers, pp * num_virtual_stages)
    return None if rest or pp == 1 else (even * num_virtual_stages,) * pp


def _micro_batch(facts: RowCells, degrees: RowDegrees, job: Job) -> int:
    micro_batch, steps = facts.size("micro_batch"), facts.size("grad_accum")
    if micro_batch is not None:
        return micro_batch
    if steps is None and degrees.tp * degrees.cp * degrees.pp > 1:
        return 1
    each, rest = divmod(job.num_seqs, degrees.replicas * facts.require_size("grad_accum", "micro-batch"))
    if rest or not each:
        raise SkippedRow("micro-batch not stated", "micro_batch")
    return each


def _offload(facts: RowCells) -> Any:
    """What rests on the host: the optimizer, activations, both; single activations do not (`list_approximations` says so)."""
    if _offloads_inputs(facts):
        return "activations"
    text = facts.text("offload").lower()
    parts = [name for name in ("optimizer", "activations") if name in text]
    return "both" if len(parts) == 2 else (parts or ["none"])[0]


def _zero(facts: RowCells, degrees: RowDegrees, node: int, slices: int) -> tuple[int, int]:
    """ZeRO stage and the replicas that it shards over: a node in hybrid sharding, a slice of several, a stated group, or all."""
    stage = facts.count("zero_stage")
    if stage is None:
        sharded = facts.flag("dist_optimizer") is not False or degrees.ep > 1
        stage = 3 if facts.flag("fsdp") else int(sharded)
    words = (facts.text("recompute_detail"), facts.text("notes"))
    group = re.search(r"\b(?:zero1? |shard )group:? (\d{1,6})\b", words[1])
    fsdp = degrees.replicas
    if group:
        fsdp = int(group[1])
    elif any(re.match(r"HSDP\b", text) for text in words):
        fsdp = node // (degrees.tp * degrees.cp)
    elif slices > 1:
        fsdp = degrees.replicas // slices
    if fsdp < 1 or degrees.replicas % fsdp:
        raise SkippedRow("ZeRO group does not divide the replicas", f"{fsdp} of {degrees.replicas}")
    return (stage, fsdp) if stage and fsdp * degrees.cp > 1 else (0, 1)


def _pipeline(
    facts: RowCells, degrees: RowDegrees, job: Job, architecture: Architecture, micro_batch: int
) -> tuple[str, int]:
    """Schedule, which the layout may refuse, and virtual stages."""
    plain, virtual_ones = (natural_schedule(degrees.pp, virtual) for virtual in (1, 2))
    if degrees.pp == 1:
        return plain, 1
    text, virtual = facts.text("pp_schedule").lower(), facts.size("vpp")
    named = _schedule_in(text)
    if virtual is None:
        num_micro_batches = job.num_seqs // (degrees.replicas * micro_batch)
        whole = get_schedule(named).supports(degrees.pp, 1) if named else False
        virtual = 1 if whole else typical_virtual_stages(architecture.num_layers, degrees.pp, num_micro_batches)
    virtual = min(virtual, max((architecture.num_layers + MAX_EMPTY_STAGES) // degrees.pp, 1))
    stands_for_both = named in ("", plain, virtual_ones)
    return natural_schedule(degrees.pp, virtual) if stands_for_both else named, virtual


def _schedule_in(text: str) -> str:
    """The schedule of a pipeline that a text names, by the longest of the names in it; "" for no text."""
    names = schedule_names_by_alias()
    found = max((name for name in names if name in text), key=len, default="")
    if text and not found:  # zbb, zbv, v-half and v-min
        raise SkippedRow("schedule not known here", text[:40])
    return names[found] if found else ""


def typical_virtual_stages(num_layers: int, pp: int, num_micro_batches: int) -> int:
    """Virtual stages where a pipeline's number is not stated: as many as leave two layers or more in each.

    Interleaving needs micro-batches in multiples of pp, and layers that come out even. A prior: the published pipelines that
    state it have one to four layers in a virtual stage (GPT-3 175B and Nemotron-4 340B one, Llama 3.1 405B two, 70B four).
    """
    if num_micro_batches % get_schedule(natural_schedule(pp, 2)).micro_batch_multiple(pp, 2):
        return 1
    counted = (num_layers, num_layers + 2)  # Llama's 126 come out even with embedding and head as a layer each
    return next((v for v in range(num_layers // (2 * pp), 1, -1) if any(n % (pp * v) == 0 for n in counted)), 1)


def read_recomputes(facts: RowCells) -> tuple[str, ...]:
    """What may be recomputed, in the order from the least to the most.

    "selective" stands for anything between none and all of a block, so all comes next; per operation it is torchtitan's.
    """
    stated, detail = facts.text("recompute").lower(), facts.text("recompute_detail").lower()
    if stated and stated not in POLICIES:
        raise SkippedRow("recompute not known here", stated[:40])
    if _offloads_inputs(facts):
        return ("full",)
    if stated == "selective":
        if is_partly_recomputed(facts):
            return ("full",)
        return ("alternate" if "per-op" in detail else "selective", "full")
    return (stated,) if stated else tuple(POLICIES)


def is_partly_recomputed(facts: RowCells) -> bool:
    """Whether a row says that some of its blocks are recomputed, without saying how many: every n-th of IBM's fms-fsdp, which
    calls it selective."""
    return "fractional" in facts.text("recompute_detail").lower()


def _offloads_inputs(facts: RowCells) -> bool:
    """MaxText's "custom" policy as Google's v6e recipes set it: block inputs wait on the host, most else is run again.

    Source: AI-Hypercomputer/maxtext, benchmarks/maxtext_trillium_model_configs.py. The projections that wait there too are
    priced as run again, which takes no longer than their transfer.
    """
    return "remat_policy=custom" in facts.text("recompute_detail").lower()


def list_approximations(facts: RowCells) -> tuple[str, ...]:
    """What a row has that the estimate has not, and is priced as something close."""
    routing, offloaded = facts.text("model") + facts.text("notes"), facts.text("offload").lower()
    checks = {
        "fp16 is priced as bf16": facts.text("dtype").lower().startswith("fp16"),
        "packed sequences are priced as one sequence each": "packed" in facts.text("notes"),
        "exchanges of experts' tokens run beside computation; priced as exposed": "ep overlap on"
        in facts.text("overlap_flags").lower(),
        "tokens over an expert's capacity are dropped; priced as an even router's": bool(
            re.search(r"token-?drop|capacity", routing)
        ),
        "single activations are kept on the host; priced as recomputed": "projections to host" in offloaded,
        "the optimizer's update runs on the host; priced as its state streamed through the device": bool(
            re.search(r"\bcpu adam", offloaded)
        ),
    }
    return tuple(words for words, holds in checks.items() if holds)
