"""Tasks from the books: a goal, a state to start from, a hint with its source, and a check of the state that is reached."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from shardwise.batch_size import BatchTradeoff
from shardwise.batch_size.noise_scale import critical_batch_of_loss
from shardwise.present.explorer.batch_view import LOSS
from shardwise.present.explorer.number_provenance import bubble
from shardwise.present.explorer.request import ViewRequest
from shardwise.present.explorer.state import State, parse_query
from shardwise.price.device_memory import TIGHT_MARGIN
from shardwise.values import COMMUNICATION_TERMS, ShardwiseError

Comparison = Literal["at most", "at least", ""]
PLAYBOOK_URL = "https://huggingface.co/spaces/nanotron/ultrascale-playbook"
SCALING_BOOK_URL = "https://jax-ml.github.io/scaling-book/training"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGoal:
    """A goal of a task: a number that is at most or at least `target`, in a unit of the page. `value` is None for a layout that
    cannot run; without a comparison it is a condition."""

    label: str
    is_met: bool
    value: float | None = None
    comparison: Comparison = ""
    target: float | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A task: its goal in a sentence, the query of its start state, a hint of the book, and its requirements.

    `requirements` is a pure function of a request; `keeps` are the fields of the start state that may not change.
    """

    name: str
    title: str
    goal: str
    hint: str
    source: str
    url: str
    start: str
    keeps: tuple[str, ...]
    requirements: Callable[[ViewRequest], Iterator[TaskGoal]]

    def start_state(self) -> State:
        """Return the state that the task starts from."""
        return replace(parse_query(self.start), task=self.name)


def _at_most(label: str, value: float | None, target: float, unit: str) -> TaskGoal:
    is_met = value is not None and value <= target
    return TaskGoal(label=label, is_met=is_met, value=value, comparison="at most", target=target, unit=unit)


def _at_least(label: str, value: float | None, target: float, unit: str) -> TaskGoal:
    is_met = value is not None and value >= target
    return TaskGoal(label=label, is_met=is_met, value=value, comparison="at least", target=target, unit=unit)


def _priced(request: ViewRequest, value: Callable[[ViewRequest], float]) -> float | None:
    """Return a number of the plan; None for a layout that cannot run."""
    try:
        request.require_legal()
        return value(request)
    except ShardwiseError:
        return None


def _fits(request: ViewRequest) -> TaskGoal:
    capacity = request.cluster.chip.capacity_bytes * (1.0 - TIGHT_MARGIN)
    return _at_most(
        "memory of a device", _priced(request, lambda priced: priced.plan.estimate.memory_bytes), capacity, "B"
    )


def exposed_share(request: ViewRequest) -> float:
    """Return the share of the step in which devices wait for communication."""
    priced = request.plan.estimate
    return sum(priced.time[axis] for axis in COMMUNICATION_TERMS) / priced.step_time_s


def _fit_70b(request: ViewRequest) -> Iterator[TaskGoal]:
    yield _fits(request)
    yield _at_least("MFU", _priced(request, lambda priced: priced.plan.estimate.mfu), 0.45, "%")


def _hide_communication(request: ViewRequest) -> Iterator[TaskGoal]:
    yield _at_most("exposed communication, of the step", _priced(request, exposed_share), 0.10, "%")
    yield _fits(request)


def _short_bubble(request: ViewRequest) -> Iterator[TaskGoal]:
    yield _at_most("bubble, idle over ideal time", _priced(request, bubble), 0.10, "%")
    yield _at_least("pipeline stages", float(request.layout.pp), 8, "")
    yield _fits(request)


def _critical_batch(request: ViewRequest) -> Iterator[TaskGoal]:
    # The noise scale is the view's default: with a scale of the user's any batch could be past it.
    tradeoff = BatchTradeoff(min_steps=1.0, noise_tokens=critical_batch_of_loss(LOSS))
    batch = float(request.job.global_batch_tokens)
    yield _at_most("steps over the fewest", tradeoff.steps(batch), 2.0, "×")
    yield _at_most("tokens over the fewest", tradeoff.tokens(batch) / tradeoff.min_tokens, 3.0, "×")
    yield _fits(request)


JOB_FIELDS = ("model", "cluster", "batch_tokens", "seq_len", "precision", "stack", "overlap", "changes")
FIELDS_WITHOUT_BATCH = tuple(name for name in JOB_FIELDS if name != "batch_tokens")

TASKS: Mapping[str, Task] = {task.name: task for task in (
    Task(
        name="fit-70b", title="Make 70B fit on 64 GPUs",
        goal="Train Llama 3 70B on 64 H100: find a layout that fits a device's memory and still reaches 45% MFU.",
        hint="Replicas hold everything. ZeRO shards optimizer state (stage 1), gradients (2) and parameters (3) "
             "over them; tensor and pipeline parallelism shard the model itself, and activations with it; "
             "recomputation trades FLOPs for activations. Use tensor parallelism within a node, and no more "
             "memory savings than needed: each costs time.",
        source="Tazi et al., The Ultra-Scale Playbook, 2025: Finding the best training configuration",
        url=PLAYBOOK_URL,
        start="model=llama-3-70b&cluster=h100:64&batch_tokens=2Mi&seq_len=4096&layout=dp=64",
        keeps=JOB_FIELDS,
        requirements=_fit_70b,
    ),
    Task(
        name="hide-communication", title="Hide the communication of 8 nodes",
        goal="Llama 3 8B on 8 nodes waits for its network: bring exposed communication under 10% of the step.",
        hint="Sharded weights are gathered while the layer before them computes, which hides it if a device has "
             "enough tokens; the collectives of tensor parallelism lie between the matrix products and are "
             "exposed. With fewer devices in a tensor group each product is larger, and the traffic for each "
             "token smaller.",
        source="Austin et al., How to Scale Your Model, 2025: How to Parallelize a Transformer for Training",
        url=SCALING_BOOK_URL,
        start="model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192&layout=tp=8+fsdp=8",
        keeps=JOB_FIELDS,
        requirements=_hide_communication,
    ),
    Task(
        name="short-bubble", title="Keep the pipeline's bubble under 10%",
        goal="Llama 3 70B on 8 pipeline stages and a small batch: keep 8 stages, and bring the bubble under 10% "
             "of the ideal time.",
        hint="The bubble of 1F1B is (p - 1) / m with p stages and m micro-batches; v virtual stages on each rank "
             "divide it by v, and zero-bubble schedules fill it with the backward passes of the weights.",
        source="Tazi et al., The Ultra-Scale Playbook, 2025: Pipeline Parallelism",
        url=PLAYBOOK_URL,
        start="model=llama-3-70b&cluster=h100:64&batch_tokens=256Ki&seq_len=4096&layout=tp=8+pp=8+micro_batch_seqs=2",
        keeps=JOB_FIELDS,
        requirements=_short_bubble,
    ),
    Task(
        name="critical-batch", title="Cross the critical batch",
        goal="Choose a batch past the critical one: at most twice the fewest steps, and at most three times the "
             "fewest tokens.",
        hint="Steps to a loss are S_min · (1 + B_noise / B), tokens E_min · (1 + B / B_noise): at the critical "
             "batch, where B is the gradient's noise scale, both are twice their least. A larger batch saves few "
             "steps and costs many tokens.",
        source="McCandlish et al., An Empirical Model of Large-Batch Training, 2018",
        url="https://arxiv.org/abs/1812.06162",
        start="view=batch&model=llama-3-8b&cluster=h100:64&batch_tokens=1Mi&seq_len=8192&layout=fsdp=64",
        keeps=FIELDS_WITHOUT_BATCH,
        requirements=_critical_batch,
    ),
)}  # fmt: skip


def task_payload(task: Task, request: ViewRequest) -> dict[str, Any]:
    """Return the task with the progress of a state: each requirement, and if all are met."""
    start = request.resolver.with_usual_job(task.start_state())
    is_same_job = all(getattr(request.state, name) == getattr(start, name) for name in task.keeps)
    start_values = "model, cluster and sequence" if "batch_tokens" not in task.keeps else "model, cluster and batch"
    requirements = [*task.requirements(request), TaskGoal(label=f"{start_values} of the task", is_met=is_same_job)]
    return {
        "name": task.name, "title": task.title, "goal": task.goal, "hint": task.hint, "source": task.source, "url": task.url,
        "start": f"task={task.name}", "done": all(requirement.is_met for requirement in requirements),
        "requirements": [
            {"label": requirement.label, "value": requirement.value, "comparison": requirement.comparison,
             "target": requirement.target, "unit": requirement.unit, "met": requirement.is_met}
            for requirement in requirements
        ],
    }  # fmt: skip


def task_names_payload() -> list[dict[str, str]]:
    """Return the tasks for a menu."""
    return [{"name": task.name, "title": task.title} for task in TASKS.values()]
