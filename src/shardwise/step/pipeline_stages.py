"""Which units each virtual stage of a pipeline has, which stages each rank along `pp` holds, what a pass has of a unit."""

from __future__ import annotations

import itertools
from functools import lru_cache

from shardwise.layout.layers_per_stage import layers_by_virtual_stage
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYER_UNITS
from shardwise.pipeline.actions import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Action,
    ActionList,
    forward_only_actions,
)
from shardwise.pipeline.messages import RankSlot, order_messages, post_receives_early
from shardwise.pipeline.registry import build_actions
from shardwise.step.instructions import Instruction
from shardwise.step.parameters import PlacedUnit, unit_paths
from shardwise.step.unit_instructions import UnitInstructions

SPLIT_UNITS = LAYER_UNITS  # units whose weights' gradients can wait: those of logits are made of too much


def stage_units(architecture: Architecture, layout: Layout) -> tuple[tuple[PlacedUnit, ...], ...]:
    """The units of each virtual stage in the model's order: the embedding is on the first, what follows the layers on the last.

    >>> from shardwise.model.load import load_model
    >>> stages = stage_units(load_model("llama-3-8b"), Layout(pp=4, schedule="1f1b"))
    >>> [len(units) for units in stages], stages[0][0], stages[-1][-1].path
    ([8, 9, 9, 8], PlacedUnit(path='embedding', kind='embedding'), 'head')
    """
    embedding, *others = unit_paths(architecture)
    layers, behind = others[: architecture.num_layers], others[architecture.num_layers :]
    ends = list(itertools.accumulate(layers_by_virtual_stage(architecture, layout), initial=0))
    stages = [layers[begin:end] for begin, end in itertools.pairwise(ends)]
    stages[0].insert(0, embedding)
    stages[-1] += behind
    return tuple(map(tuple, stages))


def build_layout_actions(layout: Layout, num_micro_batches: int) -> ActionList:
    """What the ranks along `pp` run in a step, in order: one after the other without a pipeline."""
    return build_actions(layout.schedule, layout.pp, num_micro_batches, layout.num_virtual_stages)


@lru_cache(maxsize=256)
def sample_actions(layout: Layout) -> ActionList:
    """What they run with as many micro-batches as any schedule asks for."""
    return build_layout_actions(layout, 2 * layout.pp)


@lru_cache(maxsize=256)
def splits_backward(layout: Layout) -> bool:
    """Whether weights' gradients wait (I and W), or a backward pass is whole (B)."""
    return any(action.kind == BACKWARD_WEIGHT for _, _, action in sample_actions(layout).actions())


@lru_cache(maxsize=256)
def backward_follows_forward(layout: Layout) -> bool:
    """Whether the backward pass of each micro-batch follows its forward pass at once on the last stage."""
    usual = sample_actions(layout)
    last = usual.num_stages - 1
    return all(
        len(slot) == 1 and following in [(Action(kind, *action[1:]),) for kind in (FULL_BACKWARD, BACKWARD_INPUT)]
        for slots in usual.order
        for slot, following in zip(slots, [*slots[1:], ()], strict=True)
        for action in slot
        if action[:2] == (FORWARD, last)
    )


@lru_cache(maxsize=256)
def rank_slots(layout: Layout, num_micro_batches: int, rank: int) -> tuple[RankSlot, ...]:
    """What a rank along `pp` runs in an optimizer step, in order, with the messages around each pass."""
    return _ordered_slots(build_layout_actions(layout, num_micro_batches), rank)


@lru_cache(maxsize=256)
def forward_rank_slots(layout: Layout, num_micro_batches: int, rank: int) -> tuple[RankSlot, ...]:
    """Likewise of forward passes alone: an evaluation."""
    return _ordered_slots(forward_only_actions(sample_actions(layout).placement, num_micro_batches), rank)


def _ordered_slots(actions: ActionList, rank: int) -> tuple[RankSlot, ...]:
    return post_receives_early(order_messages(actions)[rank])


def select_instructions(template: UnitInstructions, unit: str, kind: str) -> tuple[Instruction, ...]:
    """The instructions of a unit in a pass of a kind (`pipeline.actions`).

    Of units that are no layers the backward pass is never split: it is all of it in the pass that the stage before waits for,
    since gradients of logits are too large to keep.
    """
    if unit not in SPLIT_UNITS and kind in (BACKWARD_INPUT, BACKWARD_WEIGHT):
        return template.passes["backward"] if kind == BACKWARD_INPUT else ()
    return {
        FORWARD: template.passes["forward"], FULL_BACKWARD: template.passes["backward"],
        BACKWARD_INPUT: template.backward_input, BACKWARD_WEIGHT: template.backward_weight,
    }[kind]  # fmt: skip
