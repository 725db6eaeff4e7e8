"""Number of layers that each pipeline stage holds.

The embedding and the head each count as a layer, a module of multi-token prediction as two (a block and a head), and virtual
stages differ by at most one: 126 layers on 16 stages are 7, then 14 times 8, then 7. Interior stages get the remainder first.
Several virtual stages on each rank hold equally many layers where that is possible, with or without the weight of the ends.
The first and the last virtual stage, which have the embedding and the head, may go without a layer (126 layers on 128). A
layout may give other numbers; each stage then divides its own among its virtual stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from shardwise.layout.layout import Layout
from shardwise.model import Architecture
from shardwise.pipeline import get_schedule
from shardwise.pipeline.actions import StagePlacement
from shardwise.values import Value, minimum

# How layers are dealt out to stages: by cost; alike, with embedding and head as layers, or without; by their products.
BALANCED, EVEN, EQUAL, BY_PRODUCTS = STAGES = ("balanced", "even", "equal", "by_products")
NO_END_WEIGHTS = (0, 0)  # ends that count their layers alone
MAX_EMPTY_STAGES = 2  # virtual stages without a layer: the first and the last of all


def stage_placement(layout: Layout) -> StagePlacement:
    """Return the rank along `pp` of each virtual stage of a layout."""
    return get_schedule(layout.schedule).placement(layout.pp, layout.num_virtual_stages)


def layers_by_stage(architecture: Architecture, layout: Layout) -> tuple[int, ...]:
    """Return the layers on each stage of a layout: those that it gives, or the natural ones."""
    return layout.layers_per_stage or natural_layers_by_stage(architecture, stage_placement(layout))


def layers_by_virtual_stage(architecture: Architecture, layout: Layout) -> tuple[int, ...]:
    """Return the layers of each virtual stage of a layout, in the model's order."""
    virtual, by_stage, placement = (layout.num_virtual_stages, layout.layers_per_stage, stage_placement(layout))
    if by_stage is None:
        return even_layers_on_placement(architecture, placement)
    stage_layers = [
        iter(_split_over_virtual_stages(layers, virtual, reverse=stage == 0 and layers < virtual))
        for stage, layers in enumerate(by_stage)
    ]
    return tuple(next(stage_layers[rank]) for rank in placement.ranks)


def min_layers_per_stage(placement: StagePlacement) -> tuple[int, ...]:
    """Return the fewest layers that each stage can have: one for each virtual stage but those of embedding and head.

    >>> from shardwise.pipeline.actions import loop_placement, v_placement
    >>> placements = loop_placement(4, 1), loop_placement(4, 2), v_placement(4), loop_placement(1, 1)
    >>> [min_layers_per_stage(placement) for placement in placements]
    [(0, 1, 1, 0), (1, 2, 2, 1), (0, 2, 2, 2), (1,)]
    """
    if placement.num_ranks == 1:
        return (1,)
    return placement.sum_by_rank((0, *[1] * (len(placement.ranks) - 2), 0))


def _split_over_virtual_stages(layers: int, virtual: int, *, reverse: bool) -> list[int]:
    """Divide a stage's layers among its virtual stages: the first get the remainder, or with `reverse` the last."""
    counts = [layers // virtual + (index < layers % virtual) for index in range(virtual)]
    return counts[::-1] if reverse else counts


def even_layers_by_virtual_stage(architecture: Architecture, pp: int, num_virtual_stages: int) -> tuple[int, ...]:
    """Return the layers of each of pp · num_virtual_stages virtual stages, as even as they can be.

    Embedding and head count as layers as long as that leaves no stage without one. With too few layers the last stage has
    none, then the first.
    """
    num_layers, num_stages = architecture.num_layers, pp * num_virtual_stages
    if num_layers < num_stages:
        return (int(num_layers == num_stages - 1), *[1] * (num_stages - 2), 0)
    end_weights = _end_weights(architecture)
    if num_virtual_stages > 1:
        equal = (ends for ends in (NO_END_WEIGHTS, *end_weights) if _divides_evenly(num_layers, num_stages, ends))
        end_weights = (*equal, *end_weights)  # divisions into equal stages come first
    for ends in end_weights:
        layers = _spread_evenly(num_layers, num_stages, *ends)
        if min(layers) >= 1:
            return layers
    return _spread_evenly(num_layers, num_stages, *NO_END_WEIGHTS)


def equal_layers_by_stage(architecture: Architecture, pp: int) -> tuple[int, ...]:
    """Return as many layers on each stage, whatever else the ends have; the first stages get the remainder.

    >>> from shardwise.model.load import load_model
    >>> equal_layers_by_stage(load_model("llama-3-8b"), 4)
    (8, 8, 8, 8)
    """
    layers, remainder = divmod(architecture.num_layers, pp)
    return tuple(layers + (stage < remainder) for stage in range(pp))


def layers_by_products(architecture: Architecture, pp: int) -> tuple[int, ...]:
    """Return the layers of each stage where a stage takes layers until their matrix products pass its share.

    The head counts with its product, and the embedding has none. Source: nanotron 0.4, models/base.py, build_model, and
    get_block_compute_costs of the models: of attention that of as many key-value heads as query heads.

    >>> from shardwise.model.load import load_model
    >>> layers_by_products(load_model("llama-3-8b"), 4)
    (9, 9, 8, 6)
    """
    num_matrices = 3 if architecture.structure.has_gated_mlp else 2
    attention = 4 * architecture.num_heads * architecture.head_dim
    layer = (attention + num_matrices * architecture.d_ff) * architecture.d_model
    total = layer * architecture.num_layers + architecture.vocab_size * architecture.d_model
    stages, cost_so_far, stage = [0] * pp, 0, 0
    for _ in range(architecture.num_layers):
        stages[stage] += 1
        cost_so_far += layer
        stage += cost_so_far > total * ((stage + 1) / pp)
    return tuple(stages)


def has_equal_stages(architecture: Architecture, pp: Value, num_virtual_stages: Value) -> Value:
    """Return whether all virtual stages can have equally many layers, with embedding and head counted or without.

    Otherwise some stages wait for others in every micro-batch. One virtual stage on each rank always passes. Source:
    Megatron-LM, which requires the same unless a layout gives its stages.

    >>> from shardwise.model.load import load_model
    >>> [v for v in range(1, 9) if has_equal_stages(load_model("llama-3-405b"), 16, v)]
    [1, 2, 4, 8]
    """
    num_layers, num_stages, equal = architecture.num_layers, pp * num_virtual_stages, num_virtual_stages == 1
    for end_weights in (NO_END_WEIGHTS, *_end_weights(architecture)):
        equal = equal | _divides_evenly(num_layers, num_stages, end_weights)
    return equal | (num_layers + MAX_EMPTY_STAGES == num_stages)


def _end_weights(architecture: Architecture) -> tuple[tuple[int, int], ...]:
    """Return what embedding and head count as, in layers: the head with the modules of multi-token prediction, or alone."""
    return (1, 1 + 2 * architecture.num_predict_layers), (1, 1)


def _divides_evenly(num_layers: int, num_stages: Value, end_weights: tuple[int, int]) -> Value:
    """Return whether layers and end weights divide into stages of one size, with a layer on each."""
    total = num_layers + sum(end_weights)
    return (total % num_stages == 0) & (total // num_stages > max(end_weights))


def natural_layers_by_stage(architecture: Architecture, placement: StagePlacement) -> tuple[int, ...]:
    """Return the layers on each stage of a pipeline that gives none: the sums over its virtual stages."""
    return placement.sum_by_rank(even_layers_on_placement(architecture, placement))


def even_layers_on_placement(architecture: Architecture, placement: StagePlacement) -> tuple[int, ...]:
    """Return the layers of each virtual stage of a placement, as even as they can be."""
    num_ranks = placement.num_ranks
    return even_layers_by_virtual_stage(architecture, num_ranks, len(placement.ranks) // num_ranks)


def layer_ranges(stages: Sequence[int]) -> tuple[range, ...]:
    """Return the layers of each stage, from how many each has.

    >>> layer_ranges((2, 3))
    (range(0, 2), range(2, 5))
    """
    return tuple(range(begin, end) for begin, end in pairwise(accumulate(stages, initial=0)))


def count_kinds(architecture: Architecture, stages: Iterable[range], max_layers: int | None = None) -> dict[str, int]:
    """Return how many layers of each kind some stages have together, or the first `max_layers` layers of them.

    >>> from shardwise.model.load import load_model
    >>> count_kinds(load_model("deepseek-v3"), [range(2, 6), range(30, 34)], max_layers=5)
    {'dense_block': 1, 'block': 4}
    """
    counts = dict.fromkeys(architecture.layer_counts, 0)
    remaining = architecture.num_layers if max_layers is None else max_layers
    for layers in stages:
        end = min(layers.stop, layers.start + remaining)
        remaining -= end - layers.start
        for kind, count in architecture.count_layers(layers.start, end).items():
            counts[kind] += count
    return counts


def num_recomputed_layers(layers: Mapping[str, Value], max_layers: Value) -> dict[str, Value]:
    """Return how many of a stage's layers of each kind recompute: the first `max_layers`, of kinds that come one after the
    other. Numbers or arrays.

    Source: Megatron-LM, --recompute-method block with --recompute-num-layers.
    """
    counts, remaining = {}, max_layers
    for kind, count in layers.items():
        is_absent = isinstance(count, int) and count == 0
        counts[kind] = 0 if is_absent else minimum(remaining, count)
        remaining = remaining - counts[kind]
    return counts


@lru_cache(maxsize=4096)
def _spread_evenly(num_layers: int, num_stages: int, at_start: int, at_end: int) -> tuple[int, ...]:
    if num_stages == 1:
        return (num_layers,)
    base, extra = divmod(num_layers + at_start + at_end, num_stages)
    layers = [base] * num_stages
    for stage in [*range(1, num_stages - 1), 0, num_stages - 1][:extra]:
        layers[stage] += 1
    layers[0] -= at_start
    layers[-1] -= at_end
    return tuple(layers)
