"""Memory of a device of each pipeline stage under one layout, by term."""

from collections.abc import Mapping

from shardwise.hardware.cluster import Cluster
from shardwise.layout.layout import Layout
from shardwise.layout.rules.table import require_legal
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.price.estimate_terms import MEMORY
from shardwise.price.layout_pricer import Pricing


def stage_memories(
    architecture: Architecture, cluster: Cluster, job: Job, layout: Layout
) -> tuple[Mapping[str, float], ...]:
    """Return the bytes of a device of each pipeline stage, by term; the fullest is what `estimate` reports.

    Raises `InputError` with every rule that the layout breaks.
    """
    require_legal(architecture, job, cluster.num_devices, layout)
    pricing = Pricing(architecture, cluster, job, layout)
    return tuple(MEMORY.values(memory) for memory in pricing.memories(pricing.stages()))
