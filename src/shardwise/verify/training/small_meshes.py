"""A plan in small: meshes of a few devices with all of its axes and variants, and a model with all of its kinds of layers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from shardwise.layout.context_parallel import cp_variant_names, get_cp_variant
from shardwise.layout.degrees import atomic_degrees, layout_degrees
from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import violations
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.numerics import Gating
from shardwise.pipeline.registry import natural_schedule

MOST_DEVICES = 8  # processes of a host
SEQ_LEN = 16  # tokens: a piece from either end for each of eight ranks
ATOMS = ("dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep", "pp")
AXES = ("dp", "fsdp", "cp", "ep", "pp")


class SmallMesh(NamedTuple):
    """A mesh of few devices, and a model that fits it."""

    architecture: Architecture
    layout: Layout

    @property
    def degrees(self) -> dict[str, int]:
        """Of the atomic axes with more than one device."""
        return _atoms(self.architecture, self.layout)


def shrink_plan(architecture: Architecture, layout: Layout) -> tuple[SmallMesh, ...]:
    """The layout itself where it has no more than `MOST_DEVICES`, and otherwise meshes of no more: in one or another of them
    every axis, every two axes together, and every axis with more than two devices where it has as many; the model's sizes go with
    each.

    >>> from shardwise.model.load import load_model
    >>> [one.degrees for one in shrink_plan(load_model("llama-3-8b"), Layout.parse("fsdp=64 tp=8"))]
    [{'fsdp': 2, 'tp_kv': 4}, {'fsdp': 4}]
    """
    if layout.num_devices <= MOST_DEVICES:
        degrees = atomic_degrees(architecture, layout_degrees(layout))
        own = replace(layout, layers_per_stage=_uneven(layout, layout.pp))
        return (_shrink_to(architecture, layout, own, int(degrees["tp_kv"])),)
    return tuple(_cover(_features(_atoms(architecture, layout)), list(_candidates(architecture, layout))))


def _atoms(architecture: Architecture, layout: Layout) -> dict[str, int]:
    degrees = atomic_degrees(architecture, layout_degrees(layout))
    return {atom: int(degrees[atom]) for atom in ATOMS if degrees[atom] > 1}


def _features(degrees: Mapping[str, int]) -> set[tuple[str, ...]]:
    """What meshes are to have: an axis, two axes together, an axis of more than two devices."""
    several = {(atom, "of more than two") for atom, degree in degrees.items() if degree > 2}
    return {(atom,) for atom in degrees} | set(itertools.combinations(degrees, 2)) | several


def _cover(wanted: set[tuple[str, ...]], candidates: list[SmallMesh]) -> Iterator[SmallMesh]:
    """Candidates that have all that is wanted and that one of them has, each the one with most of what is left."""
    while True:
        best = max(candidates, key=lambda one: (len(wanted & _features(one.degrees)), -one.layout.num_devices))
        gained = wanted & _features(best.degrees)
        if not gained:
            return
        wanted = wanted - gained
        yield best


def _candidates(architecture: Architecture, layout: Layout) -> Iterator[SmallMesh]:
    """Legal meshes of the layout's axes and of no others."""
    own = _atoms(architecture, layout)
    tp = list(itertools.product(_degrees(own.get("tp_kv", 1)), _degrees(own.get("tp_rep", 1))))
    for degrees in itertools.product(*(_degrees(getattr(layout, axis)) for axis in AXES)):
        for tp_kv, tp_rep in tp:
            named = dict(zip(AXES, degrees, strict=True))
            if named["dp"] * named["fsdp"] * named["cp"] * named["pp"] * tp_kv * tp_rep > MOST_DEVICES:
                continue
            small = _shrink_to(architecture, layout, _choices(layout, named, tp_kv * tp_rep), tp_kv)
            legal = not violations(small.architecture, _job(small.layout), small.layout.num_devices, small.layout)
            if legal and small.degrees.keys() <= own.keys():
                yield small


def _degrees(degree: int) -> tuple[int, ...]:
    """Smaller ones that stand for it: for three devices three, since no smaller degree is above two."""
    return tuple(one for one in (1, 2, 4, 8) if one <= degree) + ((degree,) if degree == 3 else ())


def _choices(layout: Layout, degrees: Mapping[str, Any], tp: int) -> Layout:
    """The layout's own choices, as far as smaller degrees have them."""
    zero, staged = degrees["fsdp"] * degrees["cp"] > 1, degrees["pp"] > 1
    placement = layout.placement and replace(layout.placement, levels=(0,))
    return replace(
        layout, **degrees, tp=tp, etp=None if layout.expert_tp == layout.tp else 1,
        zero_stage=layout.zero_stage if zero else 0, sequence_parallel=layout.sequence_parallel and tp > 1,
        async_tp=layout.async_tp and tp > 1,
        cp_variant=layout.cp_variant if degrees["cp"] > 1 else cp_variant_names()[0], placement=placement,
        schedule=layout.schedule if staged else natural_schedule(1, 1), layers_per_stage=_uneven(layout, degrees["pp"]),
        num_virtual_stages=layout.num_virtual_stages if staged else 1,
    )  # fmt: skip


def _uneven(layout: Layout, pp: int) -> tuple[int, ...] | None:
    """Layers of each of so many stages, the first with one more, where the layout gives numbers that differ."""
    given = layout.layers_per_stage
    if pp == 1 or given is None or len(set(given)) == 1:
        return None
    return tuple(layout.num_virtual_stages + (stage == 0) for stage in range(pp))


def num_micro_batches(layout: Layout) -> int:
    """Enough that gradients are added up, and that a pipeline's schedule gets out of its warm-up."""
    return 2 * layout.pp


def _job(layout: Layout) -> Job:
    """A batch of some micro-batches."""
    seqs = layout.num_replicas * layout.micro_batch_seqs * num_micro_batches(layout)
    return Job(global_batch_tokens=seqs * SEQ_LEN, seq_len=SEQ_LEN)


def _shrink_to(architecture: Architecture, planned: Layout, layout: Layout, tp_kv: int) -> SmallMesh:
    """The model with the structure of its own and as few of everything as the mesh divides: one of each of a rank where the
    planned mesh leaves it one, and two where it leaves it more."""
    seqs, layers = min(layout.micro_batch_seqs, 2), architecture.num_dense_layers > 0
    sizes = {**_heads(architecture, planned, layout, tp_kv), **_widths(architecture, planned, layout)}
    stages = layout.pp * layout.num_virtual_stages
    fewest = 2 + layers if stages == 1 else sum(layout.layers_per_stage or (stages,))
    num_layers = min(architecture.num_layers, max(fewest, 2 + layers))
    sizes |= {
        "num_layers": num_layers, "num_dense_layers": int(layers), "global_every": min(architecture.global_every, 2),
        "num_predict_layers": min(architecture.num_predict_layers, 2), "max_positions": architecture.max_positions and SEQ_LEN,
        "sliding_window": architecture.sliding_window and 3, "nominal_num_params": None,
    }  # fmt: skip
    numerics = replace(architecture.numerics, gating=_gating(architecture, sizes))
    recomputed = None if layout.recompute_layers in (None, architecture.num_layers) else 1
    return SmallMesh(
        replace(architecture, **sizes, numerics=numerics),
        replace(layout, micro_batch_seqs=seqs, recompute_layers=recomputed),
    )


def _heads(architecture: Architecture, planned: Layout, layout: Layout, tp_kv: int) -> dict[str, Any]:
    """Heads, and the widths of attention."""
    kv, group = architecture.num_kv_heads, architecture.num_heads // architecture.num_kv_heads
    exchanged = [one.cp if get_cp_variant(one.cp_variant).exchanges_heads else 1 for one in (planned, layout)]
    of_plan = math.gcd(planned.tp, kv)
    tp_rep = layout.tp // tp_kv
    more = 2 if tp_rep == 1 and (kv > of_plan * exchanged[0] or layout.tp < planned.tp) else 1
    num_kv_heads = tp_kv * exchanged[1] * more
    num_heads = num_kv_heads * tp_rep * (2 if group > planned.tp // of_plan else 1)
    sizes = {"num_kv_heads": num_kv_heads, "num_heads": num_heads, "d_model": 12, "head_dim": _head_dim(architecture)}
    if architecture.kv_lora_rank:
        sizes |= {"head_dim": 6, "kv_lora_rank": 5, "rope_head_dim": 2, "v_head_dim": 3}
    return {**sizes, "q_lora_rank": min(architecture.q_lora_rank, 3), "lora_rank": min(architecture.lora_rank, 2)}


def _head_dim(architecture: Architecture) -> int:
    """Two pairs or more, of which rotary angles turn a whole number."""
    rotary = architecture.numerics.rotary
    found = (width for width in range(4, architecture.head_dim, 4) if not rotary.problem(width))
    return next(found, architecture.head_dim)


def _widths(architecture: Architecture, planned: Layout, layout: Layout) -> dict[str, Any]:
    """Widths that tp divides, each another one, experts that ep divides, and a vocabulary as even over tp as the plan's."""
    uneven = bool(architecture.vocab_size % planned.tp)
    sizes = {"d_ff": 5 * layout.tp, "vocab_size": 11 * layout.tp + uneven}
    sizes |= {"shared_expert_width": 3 * layout.tp} if architecture.shared_expert_width else {}
    sizes |= {"dense_d_ff": 7 * layout.tp} if architecture.dense_d_ff else {}
    if architecture.num_experts:
        num_experts = layout.ep * (2 if architecture.num_experts > layout.ep else 1)
        chosen = min(architecture.experts_per_token, 2)
        fewest = 2 * chosen if architecture.numerics.gating.groups > 1 else chosen + 1
        sizes |= {
            "num_experts": max(num_experts, fewest) if layout.ep == 1 else num_experts,
            "experts_per_token": chosen,
        }
    return sizes


def _gating(architecture: Architecture, sizes: Mapping[str, Any]) -> Gating:
    """A router that limits its choice to groups does so among two of them."""
    gating = architecture.numerics.gating
    if gating.groups == 1 or sizes["num_experts"] % 2:
        return replace(gating, groups=1, chosen_groups=1)
    size = sizes["num_experts"] // 2
    chosen = 1 if gating.chosen_groups < gating.groups and size >= sizes["experts_per_token"] else 2
    return replace(gating, groups=2, chosen_groups=chosen, votes=min(gating.votes, size))
