"""Units of each virtual stage, stages of each rank along `pp`, and the instructions of a unit in a pass."""

from __future__ import annotations

import itertools
from functools import lru_cache

from shardwise.layout import Layout, layers_by_virtual_stage
from shardwise.model import Architecture, is_layer
from shardwise.pipeline import (
    BACKWARD_INPUT,
    BACKWARD_WEIGHT,
    FORWARD,
    FULL_BACKWARD,
    Action,
    ActionList,
    RankSlot,
    build_actions,
)
from shardwise.pipeline.actions import forward_only_actions
from shardwise.pipeline.messages import order_messages, post_receives_early
from shardwise.step.instructions import Instruction
from shardwise.step.parameters import PlacedUnit, unit_paths
from shardwise.step.unit_instructions import UnitInstructions


def splits_backward_pass(unit: str) -> bool:
    """Return True if a unit's weight gradients can wait: those of logits are made of too much."""
    return is_layer(unit)


def stage_units(architecture: Architecture, layout: Layout) -> tuple[tuple[PlacedUnit, ...], ...]:
    """Return the units of each virtual stage in the model's order.

    The first stage has the embedding too, the last one what follows the layers.

    >>> from shardwise.model.load import load_model
    >>> stages = stage_units(load_model("llama-3-8b"), Layout(pp=4, schedule="1f1b"))
    >>> [len(units) for units in stages], stages[0][0], stages[-1][-1].path
    ([8, 9, 9, 8], PlacedUnit(path='embedding', kind='embedding'), 'head')
    """
    embedding, *after_embedding = unit_paths(architecture)
    layers, after_layers = after_embedding[: architecture.num_layers], after_embedding[architecture.num_layers :]
    ends = list(itertools.accumulate(layers_by_virtual_stage(architecture, layout), initial=0))
    stages = [layers[begin:end] for begin, end in itertools.pairwise(ends)]
    stages[0].insert(0, embedding)
    stages[-1] += after_layers
    return tuple(map(tuple, stages))


def build_layout_actions(layout: Layout, num_micro_batches: int) -> ActionList:
    """Return the action list of a step; without a pipeline it is one rank's micro-batches in turn."""
    return build_actions(layout.schedule, layout.pp, num_micro_batches, layout.num_virtual_stages)


@lru_cache(maxsize=256)
def sample_actions(layout: Layout) -> ActionList:
    """Return the action list with 2p micro-batches, as many as any schedule requires."""
    return build_layout_actions(layout, 2 * layout.pp)


@lru_cache(maxsize=256)
def splits_backward(layout: Layout) -> bool:
    """Return True if the schedule splits backward passes into I and W."""
    return any(action.kind == BACKWARD_WEIGHT for _, _, action in sample_actions(layout).actions())


@lru_cache(maxsize=256)
def backward_follows_forward(layout: Layout) -> bool:
    """Return True if the last stage runs each micro-batch's backward pass right after its forward pass."""
    actions = sample_actions(layout)
    last = actions.num_stages - 1
    return all(
        len(slot) == 1 and following in [(Action(kind, *action[1:]),) for kind in (FULL_BACKWARD, BACKWARD_INPUT)]
        for slots in actions.order
        for slot, following in zip(slots, [*slots[1:], ()], strict=True)
        for action in slot
        if action[:2] == (FORWARD, last)
    )


@lru_cache(maxsize=256)
def rank_slots(layout: Layout, num_micro_batches: int, rank: int) -> tuple[RankSlot, ...]:
    """Return the slots of a rank along `pp` in an optimizer step, in order, with the messages around each."""
    return _ordered_slots(build_layout_actions(layout, num_micro_batches), rank)


@lru_cache(maxsize=256)
def forward_rank_slots(layout: Layout, num_micro_batches: int, rank: int) -> tuple[RankSlot, ...]:
    """Return the slots of a rank with forward passes alone: an evaluation."""
    return _ordered_slots(forward_only_actions(sample_actions(layout).placement, num_micro_batches), rank)


def _ordered_slots(actions: ActionList, rank: int) -> tuple[RankSlot, ...]:
    return post_receives_early(order_messages(actions)[rank])


def select_instructions(unit_instructions: UnitInstructions, unit: str, kind: str) -> tuple[Instruction, ...]:
    """Return the instructions of a unit in a pass of a kind (`pipeline.actions`).

    Only layers split their backward pass. Other units run all of it in I, since gradients of logits are too large to keep.
    """
    if not splits_backward_pass(unit) and kind in (BACKWARD_INPUT, BACKWARD_WEIGHT):
        return unit_instructions.passes["backward"] if kind == BACKWARD_INPUT else ()
    return {
        FORWARD: unit_instructions.passes["forward"], FULL_BACKWARD: unit_instructions.passes["backward"],
        BACKWARD_INPUT: unit_instructions.backward_input, BACKWARD_WEIGHT: unit_instructions.backward_weight,
    }[kind]  # fmt: skip
