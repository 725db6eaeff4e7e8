"""What the gradient noise scale takes of a step: each replica's gradient of each micro-batch, before replicas are added up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardwise.dtypes import bytes_per_element
from shardwise.lowering.groups import Group
from shardwise.lowering.traffic import OPPOSITE
from shardwise.schedule.action import BACKWARD, INPUT, WEIGHT
from shardwise.sharding.collective import Issued, Kind

if TYPE_CHECKING:
    from shardwise.lowering.instance import Instance


def divided(instance: Instance) -> frozenset[str]:
    """The names of parameters of whose gradient several passes of one micro-batch give a part each: what the ends of a pipeline
    share, and what modules of multi-token prediction borrow. All others' gradients are whole behind one pass."""
    kinds = (INPUT, WEIGHT) if instance.splits else (BACKWARD,)
    passes: dict[str, set[tuple[int, str]]] = {}
    for rank in range(instance.layout.pp):
        one = instance.at(rank)
        for stage, kind in ((stage, kind) for stage in one.stages for kind in kinds):
            for path in one.giving(kind, stage):
                for parameter in one.used[path].values():
                    passes.setdefault(parameter.name, set()).add((stage, kind))
    return frozenset(name for name, given in passes.items() if len(given) > 1)


def divided_groups(instance: Instance) -> tuple[Group, ...]:
    """The groups of the rank that have such parameters."""
    names = divided(instance)
    return tuple(group for group in instance.groups if group.trained and not names.isdisjoint(group.names))


def between_ends(instance: Instance, num_micro_batches: int) -> Iterator[tuple[Issued, int]]:
    """The sums over both ends of a pipeline of what each has of a micro-batch's gradient."""
    for group in divided_groups(instance) if instance.policy.noise_scale else ():
        if group.shared:
            num_bytes = round(group.padded_size * bytes_per_element(instance.reduced))
            yield Issued(Kind.ALL_REDUCE, OPPOSITE, instance.reduced, num_bytes, "gradients"), num_micro_batches
