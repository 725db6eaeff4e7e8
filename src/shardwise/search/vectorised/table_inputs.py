"""Inputs of all sub-tables of a search."""

from __future__ import annotations

from shardwise.hardware.cluster import Cluster
from shardwise.layout.degrees import atomic_degrees
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import unit_counts
from shardwise.model.job import Job
from shardwise.price.roofline import chip_rates, loss_kind
from shardwise.price.unit_cost import UnitPricer, unit_values
from shardwise.search.vectorised.candidates import FamilyKey, PlacementTable, Space
from shardwise.search.vectorised.table_columns import Ints
from shardwise.values.precision import get_precision
from shardwise.values.symbolic import CachedSymbolValues, SymbolValues


class TableInputs:
    """The question of a search, its placement rows, the families that occur, and the pricer of units."""

    def __init__(
        self, architecture: Architecture, cluster: Cluster, job: Job, space: Space, placed: PlacementTable,
        families: tuple[FamilyKey, ...],
    ) -> None:  # fmt: skip
        self.architecture, self.cluster, self.job, self.space, self.placement_table = (
            architecture,
            cluster,
            job,
            space,
            placed,
        )
        self.families = families
        self.pricer = UnitPricer(
            architecture, chip_rates(cluster.chip, cluster.calibration), get_precision(job.precision),
            loss_kind(cluster, job), job.optimizer,
        )  # fmt: skip
        self.layout_degrees = {axis: column[placed.factorisation] for axis, column in space.degrees.items()}
        self.degrees = atomic_degrees(architecture, self.layout_degrees)
        self.units = tuple(unit_counts(architecture))
        self.modes = space.choices.modes(architecture)

    def values(self, rows: Ints, micro_batch: Ints, cp_variant: str = "all_gather") -> SymbolValues:
        degrees = {axis: column[rows] for axis, column in self.degrees.items()} | {"micro_batch_seqs": micro_batch}
        symbol_values = unit_values(self.architecture, self.job.seq_len, degrees, cp_variant, self.job.attended_tokens)
        return CachedSymbolValues(symbol_values)
