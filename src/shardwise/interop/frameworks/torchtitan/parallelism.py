"""How both releases of torchtitan express a layout and a batch: degrees, sharding, micro-batches and pipeline stages.

Layers of stages follow from what the ends count for, from layers of each stage, or from lists of modules. Source: torchtitan
0.3.0, config/configs.py, distributed/parallel_dims.py and distributed/pipeline_parallel.py; 0.2.2, config/job_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.torchtitan.models import heard_flavor
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.target import Field, Given, Need, Options, beside
from shardwise.layout.layers_per_stage import virtual_stages
from shardwise.values.errors import InputError, unknown

SECTION = "parallelism"
REPLICATE, SHARD = f"{SECTION}.data_parallel_replicate_degree", f"{SECTION}.data_parallel_shard_degree"
TP, CP, PP, EP = (f"{SECTION}.{axis}_parallel_degree" for axis in ("tensor", "context", "pipeline", "expert"))
RESHARD, BALANCER = f"{SECTION}.fsdp_reshard_after_forward", f"{SECTION}.context_parallel_load_balancer"
LOCAL, GLOBAL, MICRO = (
    "training.local_batch_size", "training.global_batch_size", f"{SECTION}.pipeline_parallel_microbatch_size",
)  # fmt: skip
DTYPE, PARAM, OFFLOAD = "training.dtype", "training.mixed_precision_param", "training.enable_cpu_offload"
POLICIES = {2: "never", 3: "always"}  # whether weights are gathered once, and kept, or again for the backward pass
REDUCED = "bf16_fp32_reduction"


def said(part: str, option: str, default: Any) -> Field:
    """A part that an option always has, whatever the release takes where it is missing."""
    return Field(lambda launch: {option: launch.parts()[part]}, lambda given: {part: given.get(option, default)})


def degree(given: Given, name: str) -> int:
    """A degree of parallelism, 1 where none is given. Raises `InputError` for what is none."""
    found = given.get(name, 1)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f"{name}: found {found!r}; a whole number of at least 1 is required")
    return found


def _sharded(launch: Launch) -> Options:
    layout = launch.layout
    usual = _usual_stage(layout.fsdp * layout.cp, layout.pp)
    policy = "default" if layout.zero_stage == usual else POLICIES.get(layout.zero_stage, "default")
    return {REPLICATE: layout.dp, SHARD: layout.fsdp, RESHARD: policy}


def _usual_stage(shards: int, pp: int) -> int:
    """What the default policy is: weights stay gathered in a pipeline, where each micro-batch would gather them again."""
    return 0 if shards == 1 else 2 if pp > 1 else 3


def _heard_sharded(given: Given) -> Mapping[str, Any]:
    replicas, shards = replicas_of(given)
    policy = given.get(RESHARD, "default")
    stages = {"default": _usual_stage(shards * degree(given, CP), degree(given, PP)),
              **{name: stage for stage, name in POLICIES.items()}}  # fmt: skip
    if policy not in stages:
        raise InputError(f"{RESHARD}: found {policy!r}; one of {', '.join(stages)} is required")
    return {"layout.dp": replicas, "layout.fsdp": shards, "layout.zero_stage": stages[policy]}


def replicas_of(given: Given) -> tuple[int, int]:
    """Replicas, and shards of each; -1 shards are as many as there are devices. Raises `InputError` unless they come out."""
    replicas, shards, devices = degree(given, REPLICATE), given.get(SHARD, -1), given.machines.num_devices
    others = replicas * degree(given, TP) * degree(given, CP) * degree(given, PP)
    if not isinstance(shards, int) or isinstance(shards, bool) or (shards != -1 and shards < 1):
        raise InputError(
            f"{SHARD}: found {shards!r}; a whole number of at least 1, or -1 for all that are left, is required"
        )
    found = devices // others if shards == -1 else shards
    if found * others != devices:
        raise InputError(
            f"{SECTION}: replicas, tensor, context and pipeline parallelism take {others} devices together"
            + (f" and {shards} shards of them {others * shards}" if shards != -1 else "")
            + f", found {devices}; a cluster that they divide is required"
        )
    return replicas, found


def _batches(launch: Launch) -> Options:
    """A pipeline cuts a rank's batch of a step into micro-batches; without one a rank's batch is a micro-batch."""
    layout, seqs = launch.layout, launch.job.num_seqs
    local = seqs // (layout.dp * layout.fsdp) if layout.pp > 1 else layout.micro_batch_seqs
    micro = layout.micro_batch_seqs if layout.pp > 1 else 1
    return {LOCAL: local, GLOBAL: seqs, MICRO: micro}


def _heard_batches(given: Given) -> Mapping[str, Any]:
    replicas, shards = replicas_of(given)
    local, every, micro = given.get(LOCAL, 8), given.get(GLOBAL, -1), given.get(MICRO, 1)
    seqs = local * replicas * shards if every < 0 else every
    if local < 1 or seqs % (local * replicas * shards):
        raise InputError(
            f"{GLOBAL}: found {seqs}; a multiple of {LOCAL} × replicas = {local * replicas * shards} is required"
        )
    if degree(given, PP) == 1:
        return {"layout.micro_batch_seqs": local, "job.global_batch_seqs": seqs}
    if seqs != local * replicas * shards:
        raise InputError(
            f"{GLOBAL}: found {seqs}, for which the pipeline runs {seqs // (local * replicas * shards)} times and drains "
            f"between; {LOCAL} × replicas = {local * replicas * shards} is what can be read"
        )
    return {"layout.micro_batch_seqs": micro, "job.global_batch_seqs": seqs}


def _steps(launch: Launch) -> Options:
    job = launch.job
    return {"training.steps": max(round(job.tokens / job.global_batch_tokens), 1)} if job.tokens else {}


def _heard_steps(given: Given) -> Mapping[str, Any]:
    replicas, shards = replicas_of(given)
    every = given.get(GLOBAL, -1)
    seqs = given.get(LOCAL, 8) * replicas * shards if every < 0 else every
    steps = given.get("training.steps")
    return {"job.tokens": float(steps * seqs * given.get("training.seq_len", 2048))} if steps else {}


def heard_formats(given: Given) -> str:
    """The formats of weights and activations by the recipe that has them, products apart. Raises `InputError` for others."""
    whole, mixed = given.get(DTYPE, "float32"), given.get(PARAM, "bfloat16")
    given.get("training.mixed_precision_reduce")
    if whole != "float32":
        raise InputError(
            f"{DTYPE}: found {whole!r}, which keeps no fp32 copy of weights and moments; float32 is what can be read"
        )
    return REDUCED if mixed == "bfloat16" else "fp32"


def formats(launch: Launch) -> Options:
    """The same of a launch."""
    return {DTYPE: "float32", PARAM: "float32" if launch.job.precision == "fp32" else "bfloat16"}


def _heard_offload(given: Given) -> Mapping[str, Any]:
    if given.get(OFFLOAD, False):
        raise InputError(
            f"{OFFLOAD}: weights, gradients and moments rest on the host; no layout has that, false is required"
        )
    return {}


def sequence_divisor(launch: Launch) -> int:
    """What the length of a sequence must be a multiple of. Source: trainer.py 0.3.0, seq_len_divisor in 0.2.2."""
    layout = launch.layout
    return (layout.tp if layout.sequence_parallel else 1) * (2 * layout.cp if layout.cp > 1 else 1)


SHARED: tuple[Field, ...] = (
    Field(_sharded, _heard_sharded),
    said("layout.tp", TP, 1),
    said("layout.cp", CP, 1),
    said("layout.pp", PP, 1),
    said("layout.ep", EP, 1),
    said("job.seq_len", "training.seq_len", 2048),
    Field(_batches, _heard_batches),
    Field(_steps, _heard_steps),
    Field(lambda launch: {}, _heard_offload),
    beside("compile.enable", "compile.components", "compile.backend",
           say=lambda launch: {"compile.enable": True, "compile.components": ["model", "loss"]}),
)  # fmt: skip
NEEDS: tuple[Need, ...] = (
    Need(
        lambda launch: launch.job.precision != "bf16",
        lambda launch: (
            f"precision bf16 reduces gradients in bf16, and torchtitan reduces them in fp32; precision={REDUCED} "
            "is what it runs"
        ),
    ),
    Need(
        lambda launch: launch.model.num_heads % launch.layout.tp == launch.model.num_kv_heads % launch.layout.tp == 0,
        lambda launch: (
            f"tp = {launch.layout.tp} must divide num_heads = {launch.model.num_heads} and num_kv_heads = "
            f"{launch.model.num_kv_heads}"
        ),
    ),
    Need(
        lambda launch: launch.job.seq_len % sequence_divisor(launch) == 0,
        lambda launch: (
            f"seq_len = {launch.job.seq_len} is not a multiple of {sequence_divisor(launch)}: of tp with sequence "
            "parallelism, times 2·cp with context parallelism"
        ),
    ),
    Need(
        lambda launch: not (launch.model.tied_embeddings and launch.layout.pp > 1),
        lambda launch: (
            f"{launch.model.name} ties its embeddings, which no pipeline of torchtitan does; pp=1 is required"
        ),
    ),
    Need(
        lambda launch: launch.layout.fsdp * launch.layout.cp * launch.layout.tp % launch.layout.ep == 0,
        lambda launch: (
            f"ep = {launch.layout.ep} takes its ranks from shards, context and tensor parallelism, which are "
            f"{launch.layout.fsdp * launch.layout.cp * launch.layout.tp} together; a divisor is required"
        ),
    ),
)

# Names of torch.distributed.pipelining, schedules.py (get_schedule_class); those of several stages on a rank have two of them
# by default.
SCHEDULES = {
    "1f1b": "1F1B", "afab": "GPipe", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS", "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}  # fmt: skip
SINGLE = ("1f1b", "afab")
FILLED = ("1f1b", "dualpipe_v")  # that take no fewer micro-batches than there are stages: the same file
MOST_STAGES = 10_000  # far above any pipeline
STAGE_SECTION = "parallelism"
FIRST, LAST = (f"{STAGE_SECTION}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last"))
PER_STAGE, SCHEDULE = (
    f"{STAGE_SECTION}.pipeline_parallel_layers_per_stage",
    f"{STAGE_SECTION}.pipeline_parallel_schedule",
)
MODULES, LIST = f"{STAGE_SECTION}.module_fqns_per_model_part", f"{STAGE_SECTION}.pipeline_parallel_schedule_csv"


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
    return Field(lambda launch: _stage_options(launch, head), lambda given: _read_stages(given, table))


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


def _stage_options(launch: Launch, head: str) -> Options:
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


def _read_stages(given: Given, table: str) -> Mapping[str, Any]:
    ranks = given.get(f"{STAGE_SECTION}.pipeline_parallel_degree", 1)
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
            raise InputError(
                f"{STAGE_SECTION}: found {layers} layers on {count} stages; at least one on each is required"
            )
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
