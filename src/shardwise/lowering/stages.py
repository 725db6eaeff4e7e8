"""Which units each virtual stage of a pipeline has, and which stages each rank along `pp` holds."""

from __future__ import annotations

import itertools
from functools import lru_cache

from shardwise.layout.layout import Layout
from shardwise.layout.stages import virtual_stages
from shardwise.lowering.parameters import PlacedUnit, unit_paths
from shardwise.model.architecture import Architecture
from shardwise.schedule.action import Placement
from shardwise.schedule.build import build
from shardwise.schedule.messages import Step, exchanges, posted


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


def held_stages(placement: Placement, rank: int) -> tuple[int, ...]:
    """The virtual stages that a rank holds, in the model's order."""
    opposite = placement.num_ranks - 1 - rank if placement.both_ends else rank
    return tuple(stage for stage, holder in enumerate(placement.ranks) if holder in (rank, opposite))


@lru_cache(maxsize=256)
def rank_steps(layout: Layout, num_micro_batches: int, rank: int) -> tuple[Step, ...]:
    """What a rank along `pp` runs in an optimizer step, in order, with the messages around each pass."""
    actions = build(layout.schedule, layout.pp, num_micro_batches, layout.num_virtual_stages)
    return posted(exchanges(actions)[rank])
