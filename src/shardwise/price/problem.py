"""Problems, which are to be sharded and priced: a model, a cluster and a job; and the defaults of what a user leaves out."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardwise.hardware import Cluster, with_published_constants
from shardwise.hardware.stacks import default_stack
from shardwise.model import Architecture, Job
from shardwise.price.roofline import loss_kind


@dataclass(frozen=True, slots=True)
class Problem:
    """A model, a cluster and a job, for which a layout is searched or priced.

    >>> import shardwise as sw
    >>> job = sw.Job(global_batch_tokens=2**20, seq_len=4096)
    >>> problem = Problem(sw.load_model("llama-3-8b"), sw.load_cluster("h100:16"), job)
    >>> problem.cluster.num_devices, problem.job.num_seqs
    (16, 256)
    """

    architecture: Architecture
    cluster: Cluster
    job: Job

    def with_defaults(self) -> Problem:
        """Return the problem with the defaults of `with_problem_defaults` filled in."""
        return Problem(self.architecture, *with_problem_defaults(self.cluster, self.job))


def with_problem_defaults(cluster: Cluster, job: Job) -> tuple[Cluster, Job]:
    """Return the cluster and the job of a plan, with defaults filled in.

    A cluster without measurements is predicted under the typical stack of its chip, unless the job names a convention of
    overlap: then the plan is made by the bound of that convention. A host, or a chip of an unknown vendor, is also planned by
    the bound. The loss is the one with the least memory that the stack has.
    """
    stack = default_stack(cluster.chip) if cluster.calibration is None and job.overlap is None else None
    cluster = with_published_constants(cluster, stack) if stack else cluster
    return cluster, replace(job, loss=loss_kind(cluster, job))
