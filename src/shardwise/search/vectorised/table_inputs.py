"""What all sub-tables of a search are evaluated from."""

from __future__ import annotations

from shardwise.hardware.cluster import Cluster
from shardwise.layout.degrees import atomic_degrees
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import unit_counts
from shardwise.model.job import Job
from shardwise.price.roofline import loss_of, rates_of
from shardwise.price.unit_cost import UnitPricer, unit_values
from shardwise.search.vectorised.candidates import FamilyKey, Placed, Space
from shardwise.search.vectorised.table_columns import Ints
from shardwise.values.precision import precision_named
from shardwise.values.symbolic import FrozenValues, Values


class TableInputs:
    """A search's question, its placed rows, the families that occur, and what units are priced with."""

    def __init__(
        self, architecture: Architecture, cluster: Cluster, job: Job, space: Space, placed: Placed,
        families: tuple[FamilyKey, ...],
    ) -> None:  # fmt: skip
        self.architecture, self.cluster, self.job, self.space, self.placed = architecture, cluster, job, space, placed
        self.families = families
        self.pricer = UnitPricer(
            architecture,
            rates_of(cluster.chip, cluster.calibration),
            precision_named(job.precision),
            loss_of(cluster, job),
            job.optimizer,
        )
        self.whole = {axis: column[placed.factorisation] for axis, column in space.degrees.items()}
        self.degrees = atomic_degrees(architecture, self.whole)
        self.units = tuple(unit_counts(architecture))
        self.modes = space.choices.modes(architecture)

    def values(self, rows: Ints, micro_batch: Ints, cp_variant: str = "all_gather") -> Values:
        degrees = {axis: column[rows] for axis, column in self.degrees.items()} | {"micro_batch_seqs": micro_batch}
        found = unit_values(self.architecture, self.job.seq_len, degrees, cp_variant, self.job.attended_tokens)
        return FrozenValues(found)
