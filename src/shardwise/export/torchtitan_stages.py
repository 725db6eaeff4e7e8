"""Layers of torchtitan's pipeline stages: by what the ends count for, by layers of each stage, or by lists of modules.

Source: torchtitan, distributed/pipeline_parallel.py (pipeline_llm, and what generates the names of modules for each stage).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.errors import InputError
from shardwise.export.field import Field, Given, Options
from shardwise.export.launch import Launch
from shardwise.export.target import Need
from shardwise.export.torchtitan_model import heard_flavor
from shardwise.layout.stages import virtual_stages
from shardwise.names import unknown

# Names of torch.distributed.pipelining, schedules.py (get_schedule_class); those of several stages on a rank have two of them
# by default.
SCHEDULES = {
    "1f1b": "1F1B", "afab": "GPipe", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS", "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}  # fmt: skip
SINGLE = ("1f1b", "afab")
FILLED = ("1f1b", "dualpipe_v")  # that take no fewer micro-batches than there are stages: the same file
MOST_STAGES = 10_000  # far above any pipeline
SECTION = "parallelism"
FIRST, LAST = (f"{SECTION}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
PER_STAGE, SCHEDULE = f"{SECTION}.pipeline_parallel_layers_per_stage", f"{SECTION}.pipeline_parallel_schedule"
MODULES, LIST = f"{SECTION}.module_fqns_per_model_part", f"{SECTION}.pipeline_parallel_schedule_csv"


def generated(num_layers: int, num_stages: int, first: int, last: int) -> tuple[int, ...] | None:
    """Layers of each stage where the first counts `first` more and the last `last` more; None where torchtitan refuses."""
    per, extra = divmod(num_layers + first + last, num_stages)
    if num_stages < 2 or per < 1 or max(first, last) > per:
        return None
    layers = [per + (stage < extra) for stage in range(num_stages)]
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def stage_field(table: str, head: str) -> Field:
    """Schedule and stages of models of a table; `head` is what the release calls the output's projection."""
    return Field(lambda launch: _say(launch, head), lambda given: _hear(given, table))


def _num_micro_batches(launch: Launch) -> int:
    layout = launch.layout
    return launch.job.num_seqs // (layout.dp * layout.fsdp * layout.micro_batch_seqs)


ENOUGH_MICRO_BATCHES = Need(
    lambda launch: (
        launch.layout.schedule not in FILLED
        or _num_micro_batches(launch) >= launch.layout.pp * launch.layout.num_virtual_stages
    ),
    lambda launch: (
        f"{SCHEDULES[launch.layout.schedule]} takes no fewer micro-batches than stages, found "
        f"{_num_micro_batches(launch)} for {launch.layout.pp * launch.layout.num_virtual_stages}; a smaller micro-batch or fewer "
        "stages are required"
    ),
)


def _say(launch: Launch, head: str) -> Options:
    layout = launch.layout
    if layout.pp == 1 or layout.schedule not in SCHEDULES:
        return {}
    stages, schedule = virtual_stages(launch.model, layout), {SCHEDULE: SCHEDULES[layout.schedule]}
    for first, last in ((1, 1), (0, 0), (1, 0), (0, 1)):
        if generated(sum(stages), len(stages), first, last) == stages:
            ends = {FIRST: first, LAST: last}
            if layout.num_virtual_stages == _usual(layout.schedule):
                return {**schedule, **ends}
            per = -(-(sum(stages) + first + last) // len(stages))
            if _num_stages(sum(stages) + first + last, per) == len(stages):
                return {**schedule, **ends, PER_STAGE: per}
    return {**schedule, MODULES: _modules(stages, head)}


def _modules(stages: tuple[int, ...], head: str) -> list[list[str]]:
    """The modules of each stage by name."""
    start, found = 0, []
    for layers in stages:
        found.append([f"layers.{layer}" for layer in range(start, start + layers)])
        start += layers
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", head]
    return found


def _usual(schedule: str) -> int:
    """Stages on each rank where nothing says how many."""
    return 1 if schedule in SINGLE else 2


def _num_stages(counted: int, per: int) -> int:
    return -(-counted // per)


def _hear(given: Given, table: str) -> Mapping[str, Any]:
    ranks = given.get(f"{SECTION}.pipeline_parallel_degree", 1)
    name, first, last = given.get(SCHEDULE, "1F1B"), given.get(FIRST, 1), given.get(LAST, 1)
    modules, per, actions = given.get(MODULES), given.get(PER_STAGE), given.get(LIST, "")
    if ranks == 1:
        return {"layout.schedule": "none"}
    if actions:
        raise InputError(f"{LIST}: found {actions!r}; a schedule by name is what can be read")
    schedule = {theirs.casefold(): ours for ours, theirs in SCHEDULES.items()}.get(str(name).casefold())
    if schedule is None:
        raise InputError(f"{SCHEDULE}: {unknown(str(name), SCHEDULES.values())}")
    layers = heard_flavor(table, given).parts["model.num_layers"]
    if modules:
        stages = _counted(modules, layers)
    else:
        count = _num_stages(layers + first + last, per) if per else ranks * _usual(schedule)
        made = generated(layers, count, first, last) if count <= MOST_STAGES else None
        if made is None:
            raise InputError(f"{SECTION}: found {layers} layers on {count} stages; at least one on each is required")
        stages = made
    if len(stages) % ranks or (schedule in SINGLE) != (len(stages) == ranks):
        each = "one stage" if schedule in SINGLE else "two or more stages"
        raise InputError(f"{SCHEDULE}: found {len(stages)} stages on {ranks} ranks; {name} has {each} on each rank")
    return {"layout.num_virtual_stages": len(stages) // ranks, "layout.stages": stages, "layout.schedule": schedule}


def _counted(modules: object, layers: int) -> tuple[int, ...]:
    """How many layers lists of modules have. Raises `InputError` unless they are the model's in order."""
    if not isinstance(modules, (list, tuple)) or not all(isinstance(one, (list, tuple)) for one in modules):
        raise InputError(f"{MODULES}: found {str(modules)[:80]!r}; a list of lists of module names is required")
    names = [[name for name in stage if str(name).startswith("layers.")] for stage in modules]
    if [name for stage in names for name in stage] != [f"layers.{layer}" for layer in range(layers)]:
        raise InputError(f"{MODULES}: layers.0 to layers.{layers - 1} in order, each once, are required")
    return tuple(len(stage) for stage in names)
