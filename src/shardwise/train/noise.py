"""What a step that measures the gradient noise scale adds to its record. Nothing here needs PyTorch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from shardwise.batch.noise_scale import noise_payload
from shardwise.batch.samples import NoiseSample, sample_of_parts
from shardwise.data.batches import Batches
from shardwise.layout.layout import Layout
from shardwise.measurement.folder import RunFolder, write_json
from shardwise.measurement.log import Log
from shardwise.planning.run_noise import noise_of_records, sample_of


def noise_sample(squares: float, norm: float, targets: Iterable[int]) -> NoiseSample | None:
    """The sample of a step: `squares` is the sum of the squared norms of the gradients of parts with so many `targets`, `norm`
    that of their sum. None where the norms are not finite, and of a batch that is a single part: a schedule may make it so small.
    """
    tokens = [count for count in targets if count]
    if len(tokens) < 2 or not (math.isfinite(squares) and math.isfinite(norm)):
        return None
    return sample_of_parts(squares, norm**2, tokens)


def write_noise(out: RunFolder, log: Log) -> None:
    """Keep what a run's steps measured in its folder, where plans find it (`batch.noise_scale`)."""
    if any(sample_of(record) for record in log.steps):
        found = noise_of_records(log.steps, out.path).noise_scale
        if found is not None:
            write_json(out.noise, noise_payload(found))


def targets_of_parts(batches: Batches, step: int, layout: Layout, num_parts: int) -> Iterator[int]:
    """Targets of the micro-batches of each of `num_parts` groups of replicas in a step: the parts of the gradient whose norms are
    taken (`Family.replica_axes`)."""
    together = layout.num_replicas // num_parts
    for targets in batches.targets_of_replicas(step, layout.num_replicas, layout.micro_batch_seqs):
        yield from (sum(targets[start : start + together]) for start in range(0, len(targets), together))
