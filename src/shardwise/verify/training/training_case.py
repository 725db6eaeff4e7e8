"""A small training run: a model, a layout, batches of random tokens in float64, and its recipe; and a plan in small: meshes
of a few devices with all its axes and variants, and a model with all its kinds of layers. No PyTorch here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.layout import Layout, atomic_degrees, cp_variant_names, get_cp_variant, layout_degrees, violations
from shardwise.model import DEFAULT_OPTIMIZER, Architecture, Gating, Job
from shardwise.pipeline import natural_schedule
from shardwise.run import TrainingRecipe
from shardwise.run.trainer.engine_prediction import issue_policy
from shardwise.run.trainer.flags import apply_changes, parse_whole_number
from shardwise.search import Plan
from shardwise.step import RankProgram
from shardwise.values import InputError, Precision, argument_label, parse_overrides

MOST_DEVICES = 8  # processes of a host
SEQ_LEN = 16  # tokens: a piece from either end for each of eight ranks
# The engine is another beyond some constants: attention runs queries in blocks of 512
# (`run.kernels.positions_and_masks.MIN_QUERY_BLOCK`), weights are gathered one unit ahead, and the first micro-batches of a
# step fill the pipeline and write the gradients that later ones add to.
MIN_LONG_SEQ_LEN = 520  # tokens
MAX_LONG_SEQ_LEN = 2_112  # tokens: attention in float64 over more of them takes many seconds
MIN_LAYERS_OF_A_KIND = 3
MIN_MICRO_BATCHES = 5  # of a replica
ATOMS = ("dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep", "pp")
AXES = ("dp", "fsdp", "cp", "ep", "pp")


class SmallMesh(NamedTuple):
    """A mesh of a few devices, and a model that fits it."""

    architecture: Architecture
    layout: Layout

    @property
    def degrees(self) -> dict[str, int]:
        """Degrees of the atomic axes with more than one device."""
        return _atoms(self.architecture, self.layout)


def shrink_plan(architecture: Architecture, layout: Layout) -> tuple[SmallMesh, ...]:
    """Return the layout itself if it has at most `MOST_DEVICES`, and otherwise meshes of at most as many.

    Among them the meshes have every axis, every pair of axes, and every axis with more than two devices if the plan has
    as many. The model's sizes follow the mesh.

    >>> from shardwise.model.load import load_model
    >>> [one.degrees for one in shrink_plan(load_model("llama-3-8b"), Layout.parse("fsdp=64 tp=8"))]
    [{'fsdp': 2, 'tp_kv': 4}, {'fsdp': 4}]
    """
    if layout.num_devices <= MOST_DEVICES:
        degrees = atomic_degrees(architecture, layout_degrees(layout))
        small_layout = replace(layout, layers_per_stage=_uneven(layout, layout.pp))
        return (_shrink_to(architecture, layout, small_layout, int(degrees["tp_kv"])),)
    return tuple(_cover(_features(_atoms(architecture, layout)), list(_candidates(architecture, layout))))


def _atoms(architecture: Architecture, layout: Layout) -> dict[str, int]:
    degrees = atomic_degrees(architecture, layout_degrees(layout))
    return {atom: int(degrees[atom]) for atom in ATOMS if degrees[atom] > 1}


def _features(degrees: Mapping[str, int]) -> set[tuple[str, ...]]:
    """Return what meshes should cover: each axis, each pair of axes, each axis of more than two devices."""
    large_axes = {(atom, "of more than two") for atom, degree in degrees.items() if degree > 2}
    return {(atom,) for atom in degrees} | set(itertools.combinations(degrees, 2)) | large_axes


def _cover(remaining: set[tuple[str, ...]], candidates: list[SmallMesh]) -> Iterator[SmallMesh]:
    """Yield candidates until they cover all features that any of them has, each time the one that adds most."""
    while True:
        best = max(candidates, key=lambda mesh: (len(remaining & _features(mesh.degrees)), -mesh.layout.num_devices))
        gained = remaining & _features(best.degrees)
        if not gained:
            return
        remaining = remaining - gained
        yield best


def _candidates(architecture: Architecture, layout: Layout) -> Iterator[SmallMesh]:
    """Yield the legal meshes with no other axes than the layout's."""
    plan_degrees = _atoms(architecture, layout)
    tp_degrees = list(
        itertools.product(
            _representative_degrees(plan_degrees.get("tp_kv", 1)),
            _representative_degrees(plan_degrees.get("tp_rep", 1)),
        )
    )
    for degrees in itertools.product(*(_representative_degrees(getattr(layout, axis)) for axis in AXES)):
        for tp_kv, tp_rep in tp_degrees:
            axes = dict(zip(AXES, degrees, strict=True))
            if axes["dp"] * axes["fsdp"] * axes["cp"] * axes["pp"] * tp_kv * tp_rep > MOST_DEVICES:
                continue
            small = _shrink_to(architecture, layout, _choices(layout, axes, tp_kv * tp_rep), tp_kv)
            legal = not violations(small.architecture, _job(small.layout), small.layout.num_devices, small.layout)
            if legal and small.degrees.keys() <= plan_degrees.keys():
                yield small


def _representative_degrees(degree: int) -> tuple[int, ...]:
    """Return the smaller degrees that represent a degree; three stays three, as no smaller degree exceeds two."""
    return tuple(smaller for smaller in (1, 2, 4, 8) if smaller <= degree) + ((degree,) if degree == 3 else ())


def _choices(layout: Layout, degrees: Mapping[str, Any], tp: int) -> Layout:
    has_zero, has_stages = degrees["fsdp"] * degrees["cp"] > 1, degrees["pp"] > 1
    placement = layout.placement and replace(layout.placement, levels=(0,))
    return replace(
        layout, **degrees, tp=tp, etp=None if layout.expert_tp == layout.tp else 1,
        zero_stage=layout.zero_stage if has_zero else 0, sequence_parallel=layout.sequence_parallel and tp > 1,
        async_tp=layout.async_tp and tp > 1,
        cp_variant=layout.cp_variant if degrees["cp"] > 1 else cp_variant_names()[0], placement=placement,
        schedule=layout.schedule if has_stages else natural_schedule(1, 1),
        layers_per_stage=_uneven(layout, degrees["pp"]),
        num_virtual_stages=layout.num_virtual_stages if has_stages else 1,
    )  # fmt: skip


def _uneven(layout: Layout, pp: int) -> tuple[int, ...] | None:
    """Return layers by stage, one more on the first, if the layout's numbers differ; else None."""
    planned = layout.layers_per_stage
    if pp == 1 or planned is None or len(set(planned)) == 1:
        return None
    return tuple(layout.num_virtual_stages + (stage == 0) for stage in range(pp))


def num_micro_batches(layout: Layout) -> int:
    """Return enough micro-batches to accumulate gradients several times and to leave the warm-up of a pipeline's schedule."""
    return layout.pp * max(2, -(-MIN_MICRO_BATCHES // layout.pp))


def long_seq_len(layout: Layout) -> int:
    """Return a length that the layout splits evenly, of more positions than a block of queries has: on each rank, unless that
    takes more than `MAX_LONG_SEQ_LEN`, and then in one process."""
    num_pieces = layout.cp * get_cp_variant(layout.cp_variant).sequence_pieces if layout.cp > 1 else 1
    seq_len = MIN_LONG_SEQ_LEN * num_pieces
    multiple = math.lcm(num_pieces, layout.cp * layout.tp, 8)
    return -(-(seq_len if seq_len <= MAX_LONG_SEQ_LEN else MIN_LONG_SEQ_LEN) // multiple) * multiple


def _job(layout: Layout) -> Job:
    num_seqs = layout.num_replicas * layout.micro_batch_seqs * num_micro_batches(layout)
    return Job(global_batch_tokens=num_seqs * SEQ_LEN, seq_len=SEQ_LEN)


def _shrink_to(architecture: Architecture, planned: Layout, layout: Layout, tp_kv: int) -> SmallMesh:
    """Return the model with its own structure and the smallest sizes that the mesh divides. A rank gets one of each
    (heads, experts) if the planned mesh leaves it one, and two if it leaves it more."""
    micro_batch_seqs, has_dense_layers = min(layout.micro_batch_seqs, 2), architecture.num_dense_layers > 0
    sizes = {**_heads(architecture, planned, layout, tp_kv), **_widths(architecture, planned, layout)}
    sizes |= {
        "num_layers": _num_layers(architecture, layout), "num_dense_layers": int(has_dense_layers),
        "global_every": min(architecture.global_every, 2),
        "num_predict_layers": min(architecture.num_predict_layers, 2),
        "max_positions": architecture.max_positions and long_seq_len(layout),
        "sliding_window": architecture.sliding_window and 3, "nominal_num_params": None,
    }  # fmt: skip
    sizes |= _kinds(architecture, sizes, layout.tp)
    numerics = replace(architecture.numerics, gating=_gating(architecture, sizes))
    recompute_layers = None if layout.recompute_layers in (None, architecture.num_layers) else 1
    return SmallMesh(
        replace(architecture, **sizes, numerics=numerics),
        replace(layout, micro_batch_seqs=micro_batch_seqs, recompute_layers=recompute_layers),
    )


def _num_layers(architecture: Architecture, layout: Layout) -> int:
    """Return the layers of the small model: a dense one where the model leads with such, `MIN_LAYERS_OF_A_KIND` of each other
    kind, and as many on each stage."""
    num_kinds = 2 if architecture.sliding_window and architecture.global_every > 1 else 1
    num_kinds = len(architecture.layer_counts) if architecture.layer_pattern else num_kinds
    num_layers = (architecture.num_dense_layers > 0) + num_kinds * MIN_LAYERS_OF_A_KIND
    if layout.layers_per_stage is not None:
        return sum(layout.layers_per_stage)
    num_stages = layout.pp * layout.num_virtual_stages
    return min(architecture.num_layers, -(-num_layers // num_stages) * num_stages)


def _kinds(architecture: Architecture, sizes: Mapping[str, Any], tp: int) -> dict[str, Any]:
    """Return the kinds of layers in small, and a pattern with each of them in turn as far as there are layers.

    A size that differs from the base layer's is twice that of the small base layer; both numbers of heads are if one is.
    """
    if not architecture.layer_pattern:
        return {}
    pattern = tuple(architecture.layer_counts)[-sizes["num_layers"] :]  # the base layer is the last
    kinds = {kind: architecture.layer_kinds[kind] for kind in pattern[:-1]}
    small_kinds = {kind: dict(_small_fields(fields, {**_small_parts(tp), **sizes})) for kind, fields in kinds.items()}
    return {"layer_kinds": small_kinds, "layer_pattern": pattern if small_kinds else ()}


def _small_parts(tp: int) -> dict[str, int]:
    """Return small sizes of what the base layer may lack."""
    return {"shared_expert_width": 3 * tp, "kv_lora_rank": 5, "rope_head_dim": 2, "v_head_dim": 3, "q_lora_rank": 3}


def _small_fields(fields: Mapping[str, Any], sizes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in fields.items():
        is_size = isinstance(value, int) and not isinstance(value, bool) and value > 0
        if name == "sliding_window" and is_size:
            yield name, 3
        elif name == "experts_per_token" and is_size:
            yield name, sizes[name]
        elif not is_size or name in ("kv_lora_rank", "rope_head_dim", "v_head_dim", "q_lora_rank"):
            yield name, sizes[name] if is_size else value
        elif name not in ("num_heads", "num_kv_heads"):
            yield name, 2 * sizes[name]
    if fields.get("kv_lora_rank"):
        yield from (("num_heads", sizes["num_heads"]), ("num_kv_heads", sizes["num_heads"]), ("head_dim", 6))
    elif {"num_heads", "num_kv_heads"} & fields.keys():
        yield from (("num_heads", 2 * sizes["num_heads"]), ("num_kv_heads", 2 * sizes["num_kv_heads"]))


def _heads(architecture: Architecture, planned: Layout, layout: Layout, tp_kv: int) -> dict[str, Any]:
    num_kv, queries_per_kv = architecture.num_kv_heads, architecture.num_heads // architecture.num_kv_heads
    head_exchange = [
        mesh_layout.cp if get_cp_variant(mesh_layout.cp_variant).exchanges_heads else 1
        for mesh_layout in (planned, layout)
    ]
    planned_tp_kv = math.gcd(planned.tp, num_kv)
    tp_rep = layout.tp // tp_kv
    kv_per_rank = 2 if tp_rep == 1 and (num_kv > planned_tp_kv * head_exchange[0] or layout.tp < planned.tp) else 1
    num_kv_heads = tp_kv * head_exchange[1] * kv_per_rank
    num_heads = num_kv_heads * tp_rep * (2 if queries_per_kv > planned.tp // planned_tp_kv else 1)
    sizes = {"num_kv_heads": num_kv_heads, "num_heads": num_heads, "d_model": 12, "head_dim": _head_dim(architecture)}
    if architecture.kv_lora_rank:
        sizes |= {"head_dim": 6, "kv_lora_rank": 5, "rope_head_dim": 2, "v_head_dim": 3}
    return {**sizes, "q_lora_rank": min(architecture.q_lora_rank, 3), "lora_rank": min(architecture.lora_rank, 2)}


def _head_dim(architecture: Architecture) -> int:
    """Return a width of two pairs or more of which rotary angles rotate a whole number."""
    rotary = architecture.numerics.rotary
    widths = (width for width in range(4, architecture.head_dim, 4) if not rotary.problem(width))
    return next(widths, architecture.head_dim)


def _widths(architecture: Architecture, planned: Layout, layout: Layout) -> dict[str, Any]:
    """Return distinct widths that tp divides, experts that ep divides, and a vocabulary as uneven over tp as planned."""
    uneven = bool(architecture.vocab_size % planned.tp)
    sizes = {"d_ff": 5 * layout.tp, "vocab_size": 11 * layout.tp + uneven}
    sizes |= {"shared_expert_width": 3 * layout.tp} if architecture.shared_expert_width else {}
    sizes |= {"dense_d_ff": 7 * layout.tp} if architecture.dense_d_ff else {}
    if architecture.num_experts:
        num_experts = layout.ep * (2 if architecture.num_experts > layout.ep else 1)
        experts_per_token = min(architecture.experts_per_token, 2)
        min_experts = 2 * experts_per_token if architecture.numerics.gating.groups > 1 else experts_per_token + 1
        sizes |= {
            "num_experts": max(num_experts, min_experts) if layout.ep == 1 else num_experts,
            "experts_per_token": experts_per_token,
        }
    return sizes


def _gating(architecture: Architecture, sizes: Mapping[str, Any]) -> Gating:
    """Return the router's rule; one that limits its choice to groups does so among two of them."""
    gating = architecture.numerics.gating
    if gating.groups == 1 or sizes["num_experts"] % 2:
        return replace(gating, groups=1, chosen_groups=1)
    group_size = sizes["num_experts"] // 2
    chosen_groups = 1 if gating.chosen_groups < gating.groups and group_size >= sizes["experts_per_token"] else 2
    return replace(gating, groups=2, chosen_groups=chosen_groups, votes=min(gating.votes, group_size))


Ids = NDArray[np.int64]
FP64 = Precision(
    name="fp64", weights="fp64", gradients="fp64", master=None, moments="fp64", activations="fp64",
    gradient_reduction="fp64",
)  # fmt: skip
MEAN_DOCUMENT_TOKENS = 5  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCase:
    """Steps of a model under a layout, with `num_seqs` sequences of `seq_len` random tokens each."""

    architecture: Architecture
    layout: Layout
    recipe: TrainingRecipe
    num_seqs: int
    seq_len: int
    precision: Precision = FP64
    optimizer: str = DEFAULT_OPTIMIZER

    @property
    def instance(self) -> RankProgram:
        """Program of the layout, as the engine issues its collectives."""
        return RankProgram(
            architecture=self.architecture, layout=self.layout, precision=self.precision,
            policy=issue_policy(self.recipe, routed=self.architecture.num_experts > 0), seq_len=self.seq_len,
            optimizer=self.optimizer,
        )  # fmt: skip

    @property
    def micro_batch_seqs(self) -> int:
        """Sequences of a micro-batch over all replicas."""
        return self.layout.num_replicas * self.layout.micro_batch_seqs

    @property
    def num_micro_batches(self) -> int:
        return -(-self.num_seqs // self.micro_batch_seqs)

    @property
    def num_targets(self) -> int:
        return self.num_seqs * self.seq_len

    def on_single_device(self) -> TrainingCase:
        """Return the case with the same micro-batches on one device, which recomputes nothing."""
        return replace(self, layout=Layout(micro_batch_seqs=self.micro_batch_seqs))

    def micro_batches(self, step: int, replica: int) -> Iterator[tuple[Ids, Ids, Ids | None]]:
        """Yield one replica's part of each global micro-batch: ids, targets and document numbers, [B, T] each. Document
        numbers are None unless attention keeps to documents."""
        rng = np.random.default_rng((self.recipe.seed, step))
        tokens = rng.integers(self.architecture.vocab_size, size=(self.num_seqs, self.seq_len + 1))
        is_document_end = rng.random((self.num_seqs, self.seq_len)) < 1 / MEAN_DOCUMENT_TOKENS
        documents: Ids = np.cumsum(is_document_end, axis=1, dtype=np.int64)
        for first in range(0, self.num_seqs, self.micro_batch_seqs):
            global_rows = np.arange(first, min(first + self.micro_batch_seqs, self.num_seqs))
            rows = np.array_split(global_rows, self.layout.num_replicas)[replica]
            yield tokens[rows, :-1], tokens[rows, 1:], documents[rows] if self.recipe.respect_documents else None


# Steep, clipped, and in several buckets, so that each of these counts within a few steps of a small model.
LEARNING_RATE, CLIP_NORM, BUCKET_BYTES = 1e-2, 0.5, 2_000
MOST_STEPS = 10  # the limits of `judge` are those of a few steps: rounding grows with them


def small_recipe(plan: Plan, steps: int | str, seed: int | str, changes: Sequence[str]) -> TrainingRecipe:
    """Return the recipe of a few steps, with the user's `recipe.NAME=VALUE` changes. Raises `InputError`. If the plan's
    job packs documents, attention keeps to them."""
    label = argument_label("steps")
    num_steps = parse_whole_number(str(steps), label)
    if not 1 <= num_steps <= MOST_STEPS:
        raise InputError(f"{label}: found {num_steps}; 1 to {MOST_STEPS} are required")
    recipe = TrainingRecipe(
        steps=num_steps, learning_rate=LEARNING_RATE, warmup_steps=min(2, num_steps), clip_norm=CLIP_NORM,
        bucket_bytes=BUCKET_BYTES, seed=parse_whole_number(str(seed), argument_label("seed")),
        respect_documents=plan.job.document_tokens is not None,
    )  # fmt: skip
    return apply_changes(recipe, parse_overrides(changes, rooms=("recipe",))["recipe"])
