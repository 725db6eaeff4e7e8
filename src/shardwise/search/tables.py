"""Sub-tables on unique keys: the cost of a layout is gathered from them, not computed for each layout.

*Block* tables depend on (tp, cp, ep, sequence parallelism, micro-batch, recompute) and the links of tp, cp, ep and pp; *state*
tables on (factorisation, placement, ZeRO stage, recompute) and on the modes that change them; *schedule* tables on (pp,
virtual stages). Each is the same evaluation of the derived expressions as for one layout, with arrays in place of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from shardwise.cluster.cluster import Cluster
from shardwise.cost.unit_costs import ActivationCost, StateCost
from shardwise.job import Job
from shardwise.layout.family import EXPERT, TP
from shardwise.model.architecture import Architecture
from shardwise.progress import Progress, silent
from shardwise.schedule.uneven import Waiting
from shardwise.search.columns import Ints, codes
from shardwise.search.mode_tables import ModeTables
from shardwise.search.placed import Placed
from shardwise.search.space import FamilyKey, Space
from shardwise.search.stage_tables import Stage, StageTables
from shardwise.search.state_tables import StateTables
from shardwise.search.table_inputs import TableInputs


@dataclass(slots=True)
class Tables:
    """All sub-tables of one search. `block_row[placed row, micro-batch]` numbers the rows of the block tables."""

    activation: Mapping[tuple[int, int], Mapping[str, ActivationCost]]  # (sp, recompute) -> unit -> columns
    mode: Mapping[tuple[int, int], Ints]  # (sp, recompute) -> the fastest mode of each row, by its number
    block_row: Ints
    state: Mapping[tuple[int, int, int], Mapping[str, StateCost]]  # (sp, zero, recompute) -> unit -> columns
    state_offset: Mapping[
        tuple[int, int, int], Ints
    ]  # the same -> what each block row adds to the placed row, by its mode
    stages: Mapping[int, tuple[Stage, ...]]  # by schedule: those that can be the worst
    fullest: Mapping[int, Ints]  # by schedule, over (pp, virtual) numbers: layers of the stage that has the most
    stage_row: Ints  # [factorisation, virtual] -> number of (pp, virtual)
    waiting: Mapping[
        int, Waiting | None
    ]  # by schedule, likewise: what uneven virtual stages add; None: nothing anywhere


def build_tables(
    architecture: Architecture,
    cluster: Cluster,
    job: Job,
    space: Space,
    placed: Placed,
    families: Iterable[FamilyKey],
    progress: Progress = silent,
) -> Tables:
    """Evaluate every sub-table once, for the families that occur."""
    inputs = TableInputs(architecture, cluster, job, space, placed, tuple(families))
    activation, mode, block_row = _block_tables(inputs, progress)
    stages, waits, stage_row = StageTables(inputs).found()
    fullest = {one: np.max([sum(stage.layers.values()) for stage in worst], axis=0) for one, worst in stages.items()}
    state, offset = _state_tables(inputs)
    offsets = {(sp, zero, policy): rows[mode[sp, policy]] for (sp, zero, policy), rows in offset.items()}
    return Tables(activation, mode, block_row, state, offsets, stages, fullest, stage_row, waits)


def _block_tables(
    inputs: TableInputs, progress: Progress
) -> tuple[dict[tuple[int, int], dict[str, ActivationCost]], dict[tuple[int, int], Ints], Ints]:
    """By (sequence parallelism, recompute) the costs of each unit in the fastest mode of each row, and that mode; and the row of
    each placed row with each micro-batch."""
    links = inputs.placed.links(inputs.cluster.reached, np.arange(len(inputs.placed.placement)))
    priced = [links.group(TP), links.group(("cp",)), links.hop(("pp",)), links.group(EXPERT)]
    priced += [links.group(TP + EXPERT)] if inputs.architecture.num_experts else []
    key = [inputs.degrees[axis] for axis in ("tp", "cp", "ep")]
    key += [np.broadcast_to(v, len(key[0])) for link in priced for v in (link.seconds_per_byte, link.latency_s)]
    rows, inverse = codes(*key)
    sizes = np.array(inputs.space.choices.micro_batch_seqs, dtype=np.int64)
    some = np.repeat(rows, len(sizes))
    row = inverse[:, None] * len(sizes) + np.arange(len(sizes))[None, :]
    either = sorted({key.sequence_parallel for key in inputs.families})
    policies = range(len(inputs.space.choices.recompute))
    best: dict[tuple[int, int], tuple[dict[str, ActivationCost], Ints]] = {}
    for sp in either:  # each with tables of its own: nothing is used twice, and two at once are much memory
        by_mode = ModeTables(inputs, some, np.tile(sizes, len(rows)), sp)
        for policy in policies:
            progress("blocks derived", len(best), len(either) * len(policies))
            best[sp, policy] = by_mode.fastest(policy)
    return {f: costs for f, (costs, _) in best.items()}, {f: mode for f, (_, mode) in best.items()}, row


def _state_tables(
    inputs: TableInputs,
) -> tuple[dict[tuple[int, int, int], dict[str, StateCost]], dict[tuple[int, int, int], Ints]]:
    """By (sequence parallelism, ZeRO stage, recompute): columns over the placed rows, once for each mode whose state is
    derived otherwise, one behind the other; and where the rows of each mode begin."""
    priced = StateTables(inputs)
    structures = {(key.sequence_parallel, zero) for key in inputs.families for zero in key.zeros}
    policies = range(len(inputs.space.choices.recompute))
    found = {(sp, zero, policy): priced.units(sp, zero, policy) for sp, zero in structures for policy in policies}
    return {key: costs for key, (costs, _) in found.items()}, {key: rows for key, (_, rows) in found.items()}
