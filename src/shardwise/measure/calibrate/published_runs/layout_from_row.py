"""Parser of a row's batch, number format and degrees into a `Job` and a `Layout`.

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

from shardwise.layout import Layout
from shardwise.layout.layers_per_stage import MAX_EMPTY_STAGES
from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow
from shardwise.model import POLICIES, Architecture, Job, policy_names
from shardwise.model.recompute_policies import MODULES
from shardwise.pipeline import get_schedule, natural_schedule
from shardwise.pipeline.registry import schedule_names_by_alias
from shardwise.values import PRECISIONS
from shardwise.values.input_texts import parse_integer

# Above this part of the memory a recompute is refuted; below, the memory model may be wrong by that much.
REFUTED = 1.1
# Tokens of a document in fine-tuning runs, which pack many into a sequence: NVIDIA's recipes take SQuAD, a paragraph, a question
# and an answer of some 200 tokens together. Source: NVIDIA-NeMo/Megatron-Bridge, recipes for fine-tuning (default dataset).
FINE_TUNING_TOKENS = 256
# A row names torchtitan, or the nightly build of PyTorch that it ran with.
TORCHTITAN = r"torchtitan|^torch [0-9a-f]{7,}\b"
# Precision recipes by the sources' names for a format and what the software and the model say; the first line that fits, and
# of it the first recipe that there is: none skips the row. "fp16-or-bf16" is priced as bf16, of the same widths and peaks. NeMo
# scales fp8 with the maxima of earlier steps until 2025, Megatron Bridge with current ones; torchtitan casts with torchao.
PRECISION_RECIPES = (
    # BigScience, chronicles-prequel.md: fp16 until the BF16 optimizer, "just written to accumulate gradients in fp32"
    (r"fp16|fp16-or-bf16", r"deepspeed", ("fp16_fp32_update",)),
    # Megatron-LM, Float16OptimizerWithFloat16Params: the update reads an fp32 copy of the gradients
    (r"fp16", r"megatron", ("fp16_fp32_update",)),
    (r"|bf16", r"deepspeed.*optimizer offload", ("bf16",)),  # the fp32 copy of the gradients rests on the host too
    (r"|bf16", r"deepspeed", ("bf16_fp32_gradients",)),
    (r"|bf16", r"bridge.*(moonlight|deepseek)", ("bf16_bf16_moments",)),
    (r"fp16", r"", ("fp16",)),
    (r"|bf16|fp16-or-bf16", r"", ("bf16",)),
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
    (r"num_vocab_tiling", "chunked"),
    (r"liger", "chunked"),
    (r"maxtext|jax|pax|llm-foundry|internevo", "streamed"),
    (r"fused loss|bridge|nemo", "fused"),
    (r"torchtitan.* tp=(?!1$)", "unfused_parallel"),
    (r"", "unfused"),
)


@dataclass(frozen=True, slots=True)
class RowDegrees:
    """Degrees of a row, whose product is its number of devices. `etp` is None without experts to split."""

    tp: int
    cp: int
    pp: int
    ep: int
    etp: int | None
    replicas: int


def read_degrees(cells: RowCells, num_devices: int) -> RowDegrees:
    """Return degrees that multiply to `num_devices`. Raises `SkippedRow` if they are not stated or do not."""
    stated = {axis: cells.size(axis) for axis in ("tp", "cp", "pp", "ep", "dp")}
    if stated["tp"] is None and stated["pp"] is None and not cells.flag("fsdp"):
        raise SkippedRow("layout not stated", "tp, pp")
    tp, cp, pp, ep = (stated[axis] or 1 for axis in ("tp", "cp", "pp", "ep"))
    replicas = num_devices // (tp * cp * pp)
    if tp * cp * pp * replicas != num_devices or (stated["dp"] or replicas) != replicas:
        product = " x ".join(str(stated[axis] or 1) for axis in ("dp", "tp", "cp", "pp"))
        raise SkippedRow("degrees do not multiply out", f"{product} on {num_devices} devices")
    etp = (cells.size("etp") or 1) if ep > 1 and tp > 1 else None
    return RowDegrees(tp, cp, pp, ep, etp, replicas)


def read_job(cells: RowCells, degrees: RowDegrees) -> Job:
    """Return batch, sequence and precision recipe of a row."""
    seq_len = cells.require_size("seq_len", "sequence length")
    num_seqs = cells.size("global_batch")
    if num_seqs is None:
        num_seqs = (
            cells.require_size("micro_batch", "batch") * cells.require_size("grad_accum", "batch") * degrees.replicas
        )
    return Job(
        global_batch_tokens=num_seqs * seq_len, seq_len=seq_len, precision=read_recipe(cells), loss=read_loss(cells),
        document_tokens=_document_tokens(cells, seq_len),
    )  # fmt: skip


def _document_tokens(cells: RowCells, seq_len: int) -> int | None:
    """Return the tokens of a document if sequences are packed from documents, as in fine-tuning."""
    return min(FINE_TUNING_TOKENS, seq_len) if cells.text("task").lower() in ("sft", "lora") else None


def read_loss(cells: RowCells) -> str:
    """Return the kind of cross-entropy of a row."""
    text = f"{cells.text('software')} {cells.text('notes')} tp={cells.text('tp') or 1}".lower()
    return next(kind for pattern, kind in LOSS_KINDS if re.search(pattern, text))


def read_recipe(cells: RowCells) -> str:
    """Return the precision recipe of a row. Raises `SkippedRow` if there is none."""
    dtype = cells.text("dtype").lower()
    run_text = " ".join(cells.text(column) for column in ("software", "model", "offload")).lower()
    candidates = (
        names
        for dtype_pattern, run_pattern, names in PRECISION_RECIPES
        if re.fullmatch(dtype_pattern, dtype) and re.search(run_pattern, run_text)
    )
    recipe = next((name for name in next(candidates, ()) if name in PRECISIONS), None)
    if recipe is None:
        raise SkippedRow("no precision recipe", dtype[:40])
    if recipe == "bf16" and "weight_dtype=bfloat16" in cells.text("notes"):
        return "bf16_bf16_state"
    if recipe == "bf16" and re.search(r"fp32 grad", cells.text("notes")):
        return "bf16_fp32_main_gradients"
    if recipe == "bf16" and (re.search(TORCHTITAN, run_text) or "mixed precision" in cells.text("notes")):
        return "bf16_fp32_reduction"  # of llm-foundry: Composer's mixed_precision DEFAULT, where PURE reduces in bf16
    return recipe


def read_layout(
    cells: RowCells, degrees: RowDegrees, job: Job, architecture: Architecture, chips_per_node: int, num_slices: int
) -> Layout:
    """Return the layout of a row; a recompute that it does not state is the first of `read_recomputes`."""
    micro_batch = _micro_batch(cells, degrees, job)
    zero_stage, fsdp = _zero(cells, degrees, chips_per_node, num_slices)
    sequence_parallel = degrees.tp > 1 and cells.flag("sp") is not False
    schedule, num_virtual_stages = _pipeline(cells, degrees, job, architecture, micro_batch)
    flags = cells.text("overlap_flags").lower()
    return Layout(
        dp=degrees.replicas // fsdp, fsdp=fsdp, tp=degrees.tp, cp=degrees.cp, pp=degrees.pp, ep=degrees.ep,
        etp=degrees.etp, num_virtual_stages=num_virtual_stages,
        layers_per_stage=even_stages(architecture.num_layers, degrees.pp, num_virtual_stages), zero_stage=zero_stage,
        sequence_parallel=sequence_parallel, cp_variant="zigzag" if degrees.cp > 1 else "all_gather",
        async_tp=sequence_parallel and ("async tp" in flags or "tp-comm-overlap" in flags),
        micro_batch_seqs=micro_batch, recompute=read_recomputes(cells)[0], schedule=schedule, offload=_offload(cells),
    )  # fmt: skip


def even_stages(num_layers: int, pp: int, num_virtual_stages: int) -> tuple[int, ...] | None:
    """Return equal numbers of layers per stage, the default of the frameworks; None if they do not divide."""
    layers, remainder = divmod(num_layers, pp * num_virtual_stages)
    return None if remainder or pp == 1 else (layers * num_virtual_stages,) * pp


def _micro_batch(cells: RowCells, degrees: RowDegrees, job: Job) -> int:
    micro_batch, grad_accum = cells.size("micro_batch"), cells.size("grad_accum")
    if micro_batch is not None:
        return micro_batch
    if grad_accum is None and degrees.tp * degrees.cp * degrees.pp > 1:
        return 1
    micro_batch_seqs, remainder = divmod(
        job.num_seqs, degrees.replicas * cells.require_size("grad_accum", "micro-batch")
    )
    if remainder or not micro_batch_seqs:
        raise SkippedRow("micro-batch not stated", "micro_batch")
    return micro_batch_seqs


def _offload(cells: RowCells) -> Any:
    """Return what is kept on the host: "optimizer", "activations", "both", "none". Single activations on the host are
    an approximation (`list_approximations`)."""
    if _offloads_inputs(cells):
        return "activations"
    text = cells.text("offload").lower()
    offloaded = [name for name in ("optimizer", "activations") if name in text]
    return "both" if len(offloaded) == 2 else (offloaded or ["none"])[0]


def _zero(cells: RowCells, degrees: RowDegrees, chips_per_node: int, num_slices: int) -> tuple[int, int]:
    """Return the ZeRO stage and the replicas that it shards over: a node (HSDP), a slice, a stated group, or all."""
    zero_stage = cells.count("zero_stage")
    if zero_stage is None:
        sharded = cells.flag("dist_optimizer") is not False or degrees.ep > 1
        zero_stage = 3 if cells.flag("fsdp") else int(sharded)
    texts = (cells.text("recompute_detail"), cells.text("notes"))
    shard_group = re.search(r"\b(?:zero1? |shard )group:? (\d{1,6})\b", texts[1])
    fsdp = degrees.replicas
    if shard_group:
        fsdp = parse_integer(shard_group[1])
    elif any(re.match(r"HSDP\b", text) for text in texts):
        fsdp = chips_per_node // (degrees.tp * degrees.cp)
    elif num_slices > 1 and "dcn_fsdp_parallelism" not in texts[1]:
        fsdp = degrees.replicas // num_slices
    if fsdp < 1 or degrees.replicas % fsdp:
        raise SkippedRow("ZeRO group does not divide the replicas", f"{fsdp} of {degrees.replicas}")
    return (zero_stage, fsdp) if zero_stage and fsdp * degrees.cp > 1 else (0, 1)


def _pipeline(
    cells: RowCells, degrees: RowDegrees, job: Job, architecture: Architecture, micro_batch: int
) -> tuple[str, int]:
    """Return the schedule, which the layout rules may still refuse, and the number of virtual stages."""
    plain_schedule, interleaved_schedule = (natural_schedule(degrees.pp, virtual) for virtual in (1, 2))
    if degrees.pp == 1:
        return plain_schedule, 1
    text, num_virtual_stages = cells.text("pp_schedule").lower(), cells.size("vpp")
    schedule = _schedule_in(text)
    if num_virtual_stages is None:
        num_micro_batches = job.num_seqs // (degrees.replicas * micro_batch)
        is_complete = get_schedule(schedule).supports(degrees.pp, 1) if schedule else False
        num_virtual_stages = (
            1 if is_complete else typical_virtual_stages(architecture.num_layers, degrees.pp, num_micro_batches)
        )
    num_virtual_stages = min(num_virtual_stages, max((architecture.num_layers + MAX_EMPTY_STAGES) // degrees.pp, 1))
    stands_for_both = not schedule or schedule in (plain_schedule, interleaved_schedule)
    return natural_schedule(degrees.pp, num_virtual_stages) if stands_for_both else schedule, num_virtual_stages


def _schedule_in(text: str) -> str:
    """Return the schedule with the longest name in the text; "" for no text. Raises `SkippedRow` for an unknown one."""
    schedule_names = schedule_names_by_alias()
    alias = max((name for name in schedule_names if name in text), key=len, default="")
    if text and not alias:  # zbb, zbv, v-half and v-min
        raise SkippedRow("schedule not known here", text[:40])
    return schedule_names[alias] if alias else ""


def typical_virtual_stages(num_layers: int, pp: int, num_micro_batches: int) -> int:
    """Return the virtual stages of a pipeline that does not state them: as many as leave two layers or more in each.

    Interleaving needs micro-batches in multiples of pp, and layers that divide evenly. A prior: the published pipelines
    that state it have one to four layers in a virtual stage (GPT-3 175B and Nemotron-4 340B one, Llama 3.1 405B two,
    70B four).
    """
    if num_micro_batches % get_schedule(natural_schedule(pp, 2)).micro_batch_multiple(pp, 2):
        return 1
    layer_counts = (num_layers, num_layers + 2)  # Llama's 126 come out even with embedding and head as a layer each
    return next((v for v in range(num_layers // (2 * pp), 1, -1) if any(n % (pp * v) == 0 for n in layer_counts)), 1)


# Of a mixture of experts that does not state it, from the least recomputation on: recipes first discard what experts need.
# Source: Megatron-Bridge 0.2.0 to 0.4.0, scripts/performance/configs (recompute_modules: moe_act, layernorm).
MOE_RECOMPUTES = ("none", "moe_act", "layernorm+moe_act", "selective", "full")


def read_recomputes(cells: RowCells) -> tuple[str, ...]:
    """Return the recompute policies that a row may have used, from the least to the most recomputation. "selective"
    means anything between none and all of a block, so "full" comes next; per operation it is torchtitan's."""
    stated, detail = cells.text("recompute").lower(), cells.text("recompute_detail").lower()
    if stated and stated not in policy_names():
        raise SkippedRow("recompute not known here", stated[:40])
    if _has_custom_policy(cells):
        return ("full",)
    if stated == "selective":
        if is_partly_recomputed(cells):
            return ("full",)
        modules = _module_policy(detail)
        return (modules,) if modules else ("alternate" if "per-op" in detail else "selective", "full")
    if stated:
        return (stated,)
    return MOE_RECOMPUTES if cells.count("n_experts") else tuple(POLICIES)


def _module_policy(detail: str) -> str | None:
    """Return the policy of modules that a detail names, such as "core_attn+layernorm"; None if it names others."""
    named = set(re.split(r"[+,\s]+", detail.removesuffix(" baseline")))
    return "+".join(name for name in MODULES if name in named) if named and named <= MODULES.keys() else None


def is_partly_recomputed(cells: RowCells) -> bool:
    """Return True if an unknown number of blocks is recomputed: every n-th in IBM's fms-fsdp, called selective."""
    return "fractional" in cells.text("recompute_detail").lower()


def _offloads_inputs(cells: RowCells) -> bool:
    """Return True for MaxText's "custom" policy of Google's v6e recipes: block inputs offloaded, the rest recomputed, unless
    they say that inputs stay on the device.

    Source: AI-Hypercomputer/maxtext, benchmarks/maxtext_trillium_model_configs.py. The projections that are offloaded
    there too are priced as recomputed, which takes no longer than their transfer.
    """
    on_device = "decoder_layer_input=device" in cells.text("notes").lower()
    return _has_custom_policy(cells) and not on_device


def _has_custom_policy(cells: RowCells) -> bool:
    return "remat_policy=custom" in cells.text("recompute_detail").lower()


def list_approximations(cells: RowCells) -> tuple[str, ...]:
    """Return the features of a row that the estimate lacks, each with what it is priced as."""
    routing_text, offload_text = cells.text("model") + cells.text("notes"), cells.text("offload").lower()
    checks = {
        "packed sequences are priced as one sequence each": "packed" in cells.text("notes"),
        "exchanges of experts' tokens run beside computation; priced as exposed": "ep overlap on"
        in cells.text("overlap_flags").lower(),
        "tokens over an expert's capacity are dropped; priced as an even router's": bool(
            re.search(r"token-?drop|capacity", routing_text)
        ),
        "single activations are kept on the host; priced as recomputed": "projections to host" in offload_text,
        "the optimizer's update runs on the host; priced as its state streamed through the device": bool(
            re.search(r"\bcpu adam", offload_text)
        ),
    }
    return tuple(text for text, holds in checks.items() if holds)
