"""Memory of the devices under a layout, by pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.hardware import Cluster
from shardwise.layout import Layout, LayoutFacts, layout_degrees, num_micro_batches
from shardwise.model import Architecture, Job, ModelFacts
from shardwise.pipeline import get_schedule
from shardwise.price import Pricing, Problem
from shardwise.price.device_memory import MemoryVerdict, memory_verdict
from shardwise.price.estimate import stage_memories
from shardwise.search.recompute_budget import LayerRecompute, fit_recompute_budget, list_layer_recompute
from shardwise.values import Displayable, InputError, Payload, ceil_div, format_bytes, raise_problems


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMemory(Displayable):
    """Memory of a device of each pipeline stage, in bytes by term (`estimate_terms.MEMORY_TERMS`), and its capacity.

    `num_micro_batches` is per replica and step. `recompute` lists what each kind of layer keeps for the backward pass and
    computes again; a budget has become the set that fits it (`search.recompute_budget`).

    >>> import shardwise as sw
    >>> memory = sw.memory("llama-3-8b", "h100:8", "fsdp=4 pp=2", global_batch_tokens="64Ki", seq_len=4096)
    >>> len(memory.stages), memory.num_micro_batches, max(memory.stage_bytes) == memory.memory_bytes
    (2, 4, True)
    """

    layout: Layout
    job: Job
    num_micro_batches: int
    memory_capacity_bytes: float
    stages: tuple[Mapping[str, float], ...]
    recompute: tuple[LayerRecompute, ...]

    @property
    def stage_bytes(self) -> tuple[float, ...]:
        """Bytes of a device of each stage."""
        return tuple(sum(stage.values()) for stage in self.stages)

    @property
    def memory_bytes(self) -> float:
        """Bytes of the fullest device."""
        return max(self.stage_bytes)

    @property
    def fullest_stage(self) -> int:
        """The first stage with the most bytes."""
        return self.stage_bytes.index(self.memory_bytes)

    @property
    def fits(self) -> bool:
        """True unless the fullest device has no room."""
        return self.verdict != "does not fit"

    @property
    def verdict(self) -> MemoryVerdict:
        """Verdict on the fullest device: "fits", "tight" or "does not fit"."""
        return memory_verdict(self.memory_bytes, self.memory_capacity_bytes)

    @property
    def margin(self) -> float:
        """Free share of the fullest device's memory; negative if it does not fit."""
        return 1 - self.memory_bytes / self.memory_capacity_bytes

    def __repr__(self) -> str:
        terms = (f"{name} {format_bytes(size)}" for name, size in self.stages[self.fullest_stage].items() if size)
        usage = f"{format_bytes(self.memory_bytes)} of {format_bytes(self.memory_capacity_bytes)}"
        return f"LayoutMemory of {self.layout}: {usage}\n  stage {self.fullest_stage}: {', '.join(terms)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryComparison:
    """Memory of a device under one layout or several, side by side.

    `defaults` names what was left out and assumed: "seq_len", "batch_tokens", "layout".

    >>> import shardwise as sw
    >>> comparison = sw.memory("llama-3-8b", "h100:8", ["tp=8", "fsdp=8"])
    >>> [memory.fits for memory in comparison.layouts], comparison.defaults
    ([True, True], ('seq_len', 'batch_tokens'))
    """

    model: Architecture
    cluster: Cluster
    layouts: tuple[LayoutMemory, ...]
    defaults: tuple[str, ...] = ()


def layout_memory(problem: Problem, layout: Layout) -> LayoutMemory:
    """Return the memory of a device of each pipeline stage. Raises `InputError` with every rule that the layout breaks."""
    problem.architecture.require_positions(problem.job.seq_len)
    planned = problem.with_defaults()
    layout = fit_recompute_budget(planned, layout)
    return LayoutMemory(
        layout=layout, job=problem.job, stages=stage_memories(problem, layout),
        recompute=list_layer_recompute(Pricing(planned, layout)),
        num_micro_batches=num_micro_batches(problem.job, layout_degrees(layout)),
        memory_capacity_bytes=problem.cluster.chip.capacity_bytes,
    )  # fmt: skip


def smallest_full_job(job: Job, layout: Layout) -> Job:
    """Return the job with the smallest batch that fills a layout: one micro-batch per replica, or in a pipeline one per stage.

    Interleaved stages hold up to half as many again, so they get two; other schedules what they require. A larger batch takes
    no more memory, except under all-forward-all-backward, which holds every micro-batch."""
    schedule, stages = get_schedule(layout.schedule), (layout.pp, layout.num_virtual_stages)
    multiple = schedule.micro_batch_multiple(*stages)
    minimum = max(layout.pp * (2 if layout.num_virtual_stages > 1 else 1), schedule.min_micro_batches(*stages))
    micro_batches = ceil_div(minimum, multiple) * multiple
    return replace(job, global_batch_tokens=micro_batches * layout.micro_batch_seqs * layout.num_replicas * job.seq_len)


def compare_memory(
    problem: Problem, layouts: Sequence[tuple[Job, Layout]], defaults: Sequence[str] = ()
) -> MemoryComparison:
    """Return the memory of a device under several layouts, each with its job.

    `defaults` names the arguments that were left out and assumed. Raises `InputError` with every rule that the layouts break."""
    memories, problems = [], list[str]()
    for job, layout in layouts:
        try:
            memories.append(layout_memory(replace(problem, job=job), layout))
        except InputError as error:
            problems += [f"{layout}: {problem}" if len(layouts) > 1 else problem for problem in error.problems]
    raise_problems(problems)
    return MemoryComparison(
        model=problem.architecture, cluster=problem.cluster, layouts=tuple(memories), defaults=tuple(defaults)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryJobRecord(Payload):
    """Fields of a job that memory depends on; `global_batch_tokens` is null where it was left out: each layout has its own."""

    global_batch_tokens: int | None
    seq_len: int
    precision: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutMemoryRecord(Payload):
    """Memory of a layout: bytes of a device of each pipeline stage, by term."""

    layout: LayoutFacts
    global_batch_tokens: int
    num_micro_batches: int
    memory_bytes: float
    fits: bool
    verdict: MemoryVerdict
    margin: float
    fullest_stage: int
    stages: Sequence[Mapping[str, float]]
    recompute: Sequence[LayerRecompute]


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord(Payload):
    """Memory of a device under some layouts; `defaults` names what was left out: `seq_len`, `batch_tokens` or `layout`."""

    SCHEMA = "shardwise.memory/2"
    model: ModelFacts
    cluster: str
    defaults: Sequence[str]
    job: MemoryJobRecord
    memory_capacity_bytes: float
    layouts: Sequence[LayoutMemoryRecord]

    @classmethod
    def of(cls, comparison: MemoryComparison) -> MemoryRecord:
        """Return the record of compared layouts."""
        model, cluster, job = comparison.model, comparison.cluster, comparison.layouts[0].job
        batch = None if "batch_tokens" in comparison.defaults else job.global_batch_tokens
        return cls(
            model=ModelFacts.of(model), cluster=cluster.name, defaults=comparison.defaults,
            job=MemoryJobRecord.from_attributes(job, global_batch_tokens=batch),
            memory_capacity_bytes=cluster.chip.capacity_bytes,
            layouts=[
                LayoutMemoryRecord.from_attributes(
                    memory, memory.job, layout=LayoutFacts.of(memory.layout, model, memory.job, cluster.topology)
                )
                for memory in comparison.layouts
            ],
        )  # fmt: skip
