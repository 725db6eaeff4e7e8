"""How many layers each pipeline stage holds.

The embedding and the head count as a layer each, a module of multi-token prediction as two (a block and a head), and
virtual stages differ by at most one (126 layers on 16 stages are 7 + 14 times 8 + 7). What is left over goes to the
interior stages first. Several virtual stages on each rank are alike where that can be, with or without what the ends count. The
first and the last virtual stage, which have the embedding and the head, may go without a layer (126 layers on 128). A layout
may give other numbers; each stage deals its own out to its virtual stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

from shardwise.layout.layout import Layout
from shardwise.model.architecture import Architecture
from shardwise.symbolic import Value, minimum

NO_ENDS = (0, 0)  # ends that count their layers alone
MOST_EMPTY = 2  # virtual stages without a layer: the first and the last of all


def held_layers(architecture: Architecture, layout: Layout) -> tuple[int, ...]:
    """Layers on each stage of a layout: those that it gives, or the natural ones."""
    return layout.layers_per_stage or layers_per_stage(architecture, layout.pp, layout.num_virtual_stages)


def held_dense_layers(architecture: Architecture, layout: Layout) -> tuple[int, ...]:
    """How many of them are leading dense layers."""
    dense = _dense(architecture, virtual_stages(architecture, layout))
    return tuple(sum(dense[stage :: layout.pp]) for stage in range(layout.pp))


def virtual_stages(architecture: Architecture, layout: Layout) -> tuple[int, ...]:
    """Layers of each virtual stage of a layout, in the model's order."""
    virtual, given = layout.num_virtual_stages, layout.layers_per_stage
    if given is None:
        return even_virtual_stages(architecture, layout.pp, virtual)
    dealt = [_dealt(layers, virtual, reverse=stage == 0 and layers < virtual) for stage, layers in enumerate(given)]
    return tuple(own[turn] for turn in range(virtual) for own in dealt)


def fewest_layers(pp: int, num_virtual_stages: int) -> tuple[int, ...]:
    """The fewest layers that each stage can have: one for each virtual stage but those of embedding and head.

    >>> fewest_layers(4, 1), fewest_layers(4, 2), fewest_layers(1, 1)
    ((0, 1, 1, 0), (1, 2, 2, 1), (1,))
    """
    if pp == 1:
        return (1,)
    return tuple(num_virtual_stages - (stage in (0, pp - 1)) for stage in range(pp))


def _dealt(layers: int, virtual: int, *, reverse: bool) -> list[int]:
    """A stage's layers over its virtual stages; those with one more are the first, or the last: then the embedding's has none."""
    dealt = [layers // virtual + (turn < layers % virtual) for turn in range(virtual)]
    return dealt[::-1] if reverse else dealt


def even_virtual_stages(architecture: Architecture, pp: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Layers of each of pp times so many virtual stages, as even as they can be.

    The ends make room as long as that leaves no stage without a layer; where there are too few, the last goes without one, then
    the first.
    """
    num_layers, count = architecture.num_layers, pp * num_virtual_stages
    if num_layers < count:
        return (int(num_layers == count - 1), *[1] * (count - 2), 0)
    ends = _ends(architecture)
    if num_virtual_stages > 1:
        ends = (*(one for one in (NO_ENDS, *ends) if _comes_out(num_layers, count, one)), *ends)
    divisions = (_evenly(num_layers, count, *one) for one in ends)
    return next((one for one in divisions if min(one) >= 1), _evenly(num_layers, count, *NO_ENDS))


def are_alike(architecture: Architecture, pp: Value, num_virtual_stages: Value) -> Value:
    """Whether virtual stages, as even as they can be, are alike, with embedding and head counted or without.

    Else some wait for others in every micro-batch, and a stage holds other than its layers say; of one on each stage it is not
    asked. Source: Megatron-LM, which asks the same unless a layout says its stages.

    >>> from shardwise.model.load import load_model
    >>> [v for v in range(1, 9) if are_alike(load_model("llama-3-405b"), 16, v)]
    [1, 2, 4, 8]
    """
    num_layers, count, alike = architecture.num_layers, pp * num_virtual_stages, num_virtual_stages == 1
    for one in (NO_ENDS, *_ends(architecture)):
        alike = alike | _comes_out(num_layers, count, one)
    return alike | (num_layers + MOST_EMPTY == count)


def _ends(architecture: Architecture) -> tuple[tuple[int, int], ...]:
    """What the first and the last stage count beside their layers: a head with modules of multi-token prediction, or alone."""
    return (1, 1 + 2 * architecture.num_predict_layers), (1, 1)


def _comes_out(num_layers: int, count: Value, ends: tuple[int, int]) -> Value:
    """Whether stages that count this at their ends all count the same, with a layer on each."""
    counted = num_layers + sum(ends)
    return (counted % count == 0) & (counted // count > max(ends))


def layers_per_stage(architecture: Architecture, pp: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Layers on each of `pp` stages, each with its virtual stages i, i + pp, i + 2 pp, ... added up."""
    layers = even_virtual_stages(architecture, pp, num_virtual_stages)
    return tuple(sum(layers[stage::pp]) for stage in range(pp))


def dense_layers_per_stage(architecture: Architecture, pp: int, num_virtual_stages: int) -> tuple[int, ...]:
    """How many of them are leading dense layers, whose MLP has no experts."""
    dense = _dense(architecture, even_virtual_stages(architecture, pp, num_virtual_stages))
    return tuple(sum(dense[stage::pp]) for stage in range(pp))


def _dense(architecture: Architecture, stages: Sequence[int]) -> tuple[int, ...]:
    """Leading dense layers of stages in order."""
    dense, left = [], architecture.num_dense_layers
    for layers in stages:
        dense.append(min(layers, left))
        left -= dense[-1]
    return tuple(dense)


def recomputed_layers(layers: Mapping[str, Value], most: Value | None) -> dict[str, Value]:
    """How many of a stage's layers of each kind recompute: the first `most`, dense ones before the others; None: all.

    Source: Megatron-LM, --recompute-method block with --recompute-num-layers. Assumes that a stage's dense layers come
    first, which virtual stages need not keep to.
    """
    if most is None:
        return dict(layers)
    found, left = {}, most
    for kind, count in layers.items():
        never = isinstance(count, int) and count == 0
        found[kind] = 0 if never else minimum(left, count)
        left = left - found[kind]
    return found


@lru_cache(maxsize=4096)
def _evenly(num_layers: int, count: int, at_start: int, at_end: int) -> tuple[int, ...]:
    if count == 1:
        return (num_layers,)
    base, extra = divmod(num_layers + at_start + at_end, count)
    layers = [base] * count
    for stage in [*range(1, count - 1), 0, count - 1][:extra]:
        layers[stage] += 1
    layers[0] -= at_start
    layers[-1] -= at_end
    return tuple(layers)
