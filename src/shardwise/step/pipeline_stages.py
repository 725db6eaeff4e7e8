"""Which units each virtual stage of a pipeline has, which stages each rank along `pp` holds, what a pass has of a unit."""

from __future__ import annotations

import itertools
from functools import lru_cache

from shardwise.layout.layers_per_stage import virtual_stages
from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import LAYERS
from shardwise.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, ActionList, forward_passes
from shardwise.pipeline.messages import Step, exchanges, posted
from shardwise.pipeline.registry import build
from shardwise.step.instructions import Instruction
from shardwise.step.parameters import PlacedUnit, unit_paths
from shardwise.step.unit_instructions import Template

SPLIT = LAYERS  # units whose weights' gradients can wait: those of logits are made of too much


def stage_units(architecture: Architecture, layout: Layout) -> tuple[tuple[PlacedUnit, ...], ...]:
    """The units of each virtual stage in the model's order: the embedding is on the first, what follows the layers on the last.

    >>> from shardwise.model.load import load_model
    >>> stages = stage_units(load_model("llama-3-8b"), Layout(pp=4, schedule="1f1b"))
    >>> [len(units) for units in stages], stages[0][0], stages[-1][-1].path
    ([8, 9, 9, 8], PlacedUnit(path='embedding', kind='embedding'), 'head')
    """
    embedding, *others = unit_paths(architecture)
    layers, behind = others[: architecture.num_layers], others[architecture.num_layers :]
    ends = list(itertools.accumulate(virtual_stages(architecture, layout), initial=0))
    stages = [layers[begin:end] for begin, end in itertools.pairwise(ends)]
    stages[0].insert(0, embedding)
    stages[-1] += behind
    return tuple(map(tuple, stages))


def actions_of(layout: Layout, num_micro_batches: int) -> ActionList:
    """What the ranks along `pp` run in a step, in order: one after the other without a pipeline."""
    return build(layout.schedule, layout.pp, num_micro_batches, layout.num_virtual_stages)


@lru_cache(maxsize=256)
def usual_actions(layout: Layout) -> ActionList:
    """What they run with as many micro-batches as any schedule asks for."""
    return actions_of(layout, 2 * layout.pp)


@lru_cache(maxsize=256)
def splits(layout: Layout) -> bool:
    """Whether weights' gradients wait (I and W), or a backward pass is whole (B)."""
    return any(action.kind == WEIGHT for _, _, action in usual_actions(layout).actions())


@lru_cache(maxsize=256)
def turns(layout: Layout) -> bool:
    """Whether the backward pass of each micro-batch follows its forward pass at once on the last stage."""
    usual = usual_actions(layout)
    last = usual.num_stages - 1
    return all(
        len(slot) == 1 and following in [(Action(kind, *action[1:]),) for kind in (BACKWARD, INPUT)]
        for slots in usual.order
        for slot, following in zip(slots, [*slots[1:], ()], strict=True)
        for action in slot
        if action[:2] == (FORWARD, last)
    )


@lru_cache(maxsize=256)
def rank_steps(layout: Layout, num_micro_batches: int, rank: int) -> tuple[Step, ...]:
    """What a rank along `pp` runs in an optimizer step, in order, with the messages around each pass."""
    return _steps(actions_of(layout, num_micro_batches), rank)


@lru_cache(maxsize=256)
def forward_steps(layout: Layout, num_micro_batches: int, rank: int) -> tuple[Step, ...]:
    """Likewise of forward passes alone: an evaluation."""
    return _steps(forward_passes(usual_actions(layout).placement, num_micro_batches), rank)


def _steps(actions: ActionList, rank: int) -> tuple[Step, ...]:
    return posted(exchanges(actions)[rank])


def of_kind(template: Template, unit: str, kind: str) -> tuple[Instruction, ...]:
    """The instructions of a unit in a pass of a kind (`pipeline.actions`).

    Of units that are no layers the backward pass is never split: it is all of it in the pass that the stage before waits for,
    since gradients of logits are too large to keep.
    """
    if unit not in SPLIT and kind in (INPUT, WEIGHT):
        return template.passes["backward"] if kind == INPUT else ()
    return {
        FORWARD: template.passes["forward"], BACKWARD: template.passes["backward"],
        INPUT: template.of_inputs, WEIGHT: template.of_weights,
    }[kind]  # fmt: skip
