"""Collectives of a step that carry no tensor of the model: norms of gradients, largest sizes for scales, and what routers did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache

from shardwise.derive.derivation import derived_unit
from shardwise.derive.shardings import optimizer_rest, weight_use
from shardwise.issuing import IssuePolicy
from shardwise.layout.family import BATCH, EXPERT, TP, Family
from shardwise.lowering.amaxes import num_operands
from shardwise.lowering.traffic import PIPELINE, Traffic
from shardwise.model.architecture import Structure
from shardwise.model.decoder import structure_units
from shardwise.model.operations import Route
from shardwise.model.program import Role
from shardwise.sharding.collective import Kind
from shardwise.sharding.spec import Axes
from shardwise.symbolic import constant, product

NORM, NOISE, AMAX, ROUTING, AUXILIARY = "norm", "noise scale", "amax", "routing", "auxiliary loss"
NUM_ROUTERS = "num_routers"  # the symbol for how many blocks have a router
CONTROL_UNIT = "head"  # with whose traffic it is priced: every model has one
ORDER: Axes = ("pp", *BATCH, *EXPERT, "cp", *TP)


@lru_cache(maxsize=1024)
def control_traffic(structure: Structure, family: Family, policy: IssuePolicy) -> tuple[Traffic, ...]:
    """The norm's AllReduce, that of the noise scale where it is measured, that of the largest sizes from which scales follow,
    and, as often as the policy says, that of the routers' statistics of all layers at once; where these make a loss, its sum over
    the stages."""
    family = replace(family, experts=structure.experts)
    found = [
        Traffic(
            CONTROL_UNIT, "update", Kind.ALL_REDUCE, norm_axes(structure, family), Role.STATISTIC, constant(1.0), (NORM,),
            reason="each rank has squared its own part of the gradients",
        )
    ]  # fmt: skip
    if policy.noise_scale:
        found.append(
            Traffic(
                CONTROL_UNIT, "update", Kind.ALL_REDUCE, noise_axes(structure, family), Role.STATISTIC, constant(1.0),
                (NOISE,), reason="each rank has squared its own part of each micro-batch's gradient",
            )
        )  # fmt: skip
    if family.shares_amax:
        found.append(
            Traffic(
                CONTROL_UNIT, "update", Kind.ALL_REDUCE, ORDER, Role.STATISTIC, num_operands(structure), (AMAX,),
                reason="each rank has the largest size of its own part of what products take",
            )
        )  # fmt: skip
    if structure.experts and policy.statistics == "micro_batch":
        found.append(
            Traffic(
                CONTROL_UNIT, "update", Kind.ALL_REDUCE, PIPELINE, Role.STATISTIC, constant(1.0), (AUXILIARY,),
                reason="each stage has the loss of its own routers",
            )
        )  # fmt: skip
    if structure.experts and policy.statistics_each:
        each = product([NUM_ROUTERS, "E"], coefficient=policy.statistics_each)
        phase = "backward" if policy.statistics == "micro_batch" else "update"
        found.append(
            Traffic(
                CONTROL_UNIT, phase, Kind.ALL_REDUCE, routing_axes(structure, family), Role.STATISTIC, each, (ROUTING,),
                reason="each rank has counted the rows of its own tokens",
            )
        )  # fmt: skip
    return tuple(found)


def routing_axes(structure: Structure, family: Family) -> Axes:
    """The axes that split tokens where their experts are chosen."""
    forward = derived_unit(structure, family, "block").forward
    gates = next(one.outputs[0] for one in forward.program.operations if isinstance(one, Route))
    return tuple(axis for axis in ORDER if axis in forward.specs[gates].sharded_axes)


def norm_axes(structure: Structure, family: Family) -> Axes:
    """The axes that split any part of the optimizer's state, and the stages, which hold different layers.

    One AllReduce over all of them: what a rank shares with others of that group it counts in part.
    """
    split = {"pp", *(axis for spec_axes in _state_axes(structure, family) for axis in spec_axes)}
    return tuple(axis for axis in ORDER if axis in split)


def noise_axes(structure: Structure, family: Family) -> Axes:
    """The axes that split micro-batches among replicas, or a trained weight where it is used, and the stages: over them the
    squares of every micro-batch's gradient are added up."""
    split = {"pp", *family.replica_axes}
    for name in structure_units(structure):
        unit = derived_unit(structure, family, name)
        split.update(*(weight_use(unit.family, dims).sharded_axes for dims in unit.trained.values()))
    return tuple(axis for axis in ORDER if axis in split)


def _state_axes(structure: Structure, family: Family) -> Iterator[frozenset[str]]:
    for name in structure_units(structure):
        unit = derived_unit(structure, family, name)
        for dims in unit.trained.values():
            yield optimizer_rest(unit.family, dims).sharded_axes
