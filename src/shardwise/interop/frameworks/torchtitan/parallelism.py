"""How both releases of torchtitan express a layout and a batch: degrees, sharding, micro-batches and pipeline stages.

Layers of stages follow from what the ends count for, from layers of each stage, or from lists of modules. Source: torchtitan
0.3.0, config/configs.py, distributed/parallel_dims.py and distributed/pipeline_parallel.py; 0.2.2, config/job_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.torchtitan.models import read_flavor
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.target import OptionMapping, OptionReader, Options, Requirement, add_options
from shardwise.layout.layers_per_stage import layers_by_virtual_stage
from shardwise.values.errors import InputError, describe_unknown

SECTION = "parallelism"
REPLICATE, SHARD = f"{SECTION}.data_parallel_replicate_degree", f"{SECTION}.data_parallel_shard_degree"
TP, CP, PP, EP = (f"{SECTION}.{axis}_parallel_degree" for axis in ("tensor", "context", "pipeline", "expert"))
RESHARD_AFTER_FORWARD, LOAD_BALANCER = (
    f"{SECTION}.fsdp_reshard_after_forward",
    f"{SECTION}.context_parallel_load_balancer",
)
LOCAL_BATCH, GLOBAL_BATCH, MICRO_BATCH = (
    "training.local_batch_size", "training.global_batch_size", f"{SECTION}.pipeline_parallel_microbatch_size",
)  # fmt: skip
DTYPE, PARAM_DTYPE, CPU_OFFLOAD = "training.dtype", "training.mixed_precision_param", "training.enable_cpu_offload"
RESHARD_POLICIES = {
    2: "never",
    3: "always",
}  # whether weights are gathered once, and kept, or again for the backward pass
DEFAULT_PRECISION = "bf16_fp32_reduction"


def map_always(part: str, option: str, default: Any) -> OptionMapping:
    """A part that an option always has, whatever the release takes where it is missing."""
    return OptionMapping(
        lambda launch: {option: launch.fields()[part]}, lambda given: {part: given.get(option, default)}
    )


def get_degree(given: OptionReader, name: str) -> int:
    """A degree of parallelism, 1 where none is given. Raises `InputError` for what is none."""
    found = given.get(name, 1)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise InputError(f"{name}: found {found!r}; a whole number of at least 1 is required")
    return found


def _sharding_options(launch: Launch) -> Options:
    layout = launch.layout
    usual = _default_zero_stage(layout.fsdp * layout.cp, layout.pp)
    policy = "default" if layout.zero_stage == usual else RESHARD_POLICIES.get(layout.zero_stage, "default")
    return {REPLICATE: layout.dp, SHARD: layout.fsdp, RESHARD_AFTER_FORWARD: policy}


def _default_zero_stage(shards: int, pp: int) -> int:
    """What the default policy is: weights stay gathered in a pipeline, where each micro-batch would gather them again."""
    return 0 if shards == 1 else 2 if pp > 1 else 3


def _read_sharding(given: OptionReader) -> Mapping[str, Any]:
    replicas, shards = read_replicas(given)
    policy = given.get(RESHARD_AFTER_FORWARD, "default")
    stages = {"default": _default_zero_stage(shards * get_degree(given, CP), get_degree(given, PP)),
              **{name: stage for stage, name in RESHARD_POLICIES.items()}}  # fmt: skip
    if policy not in stages:
        raise InputError(f"{RESHARD_AFTER_FORWARD}: found {policy!r}; one of {', '.join(stages)} is required")
    return {"layout.dp": replicas, "layout.fsdp": shards, "layout.zero_stage": stages[policy]}


def read_replicas(given: OptionReader) -> tuple[int, int]:
    """Replicas, and shards of each; -1 shards are as many as there are devices. Raises `InputError` unless they come out."""
    replicas, shards, devices = get_degree(given, REPLICATE), given.get(SHARD, -1), given.machines.num_devices
    others = replicas * get_degree(given, TP) * get_degree(given, CP) * get_degree(given, PP)
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


def _batch_options(launch: Launch) -> Options:
    """A pipeline cuts a rank's batch of a step into micro-batches; without one a rank's batch is a micro-batch."""
    layout, seqs = launch.layout, launch.job.num_seqs
    local = seqs // (layout.dp * layout.fsdp) if layout.pp > 1 else layout.micro_batch_seqs
    micro = layout.micro_batch_seqs if layout.pp > 1 else 1
    return {LOCAL_BATCH: local, GLOBAL_BATCH: seqs, MICRO_BATCH: micro}


def _read_batch(given: OptionReader) -> Mapping[str, Any]:
    replicas, shards = read_replicas(given)
    local, every, micro = given.get(LOCAL_BATCH, 8), given.get(GLOBAL_BATCH, -1), given.get(MICRO_BATCH, 1)
    seqs = local * replicas * shards if every < 0 else every
    if local < 1 or seqs % (local * replicas * shards):
        raise InputError(
            f"{GLOBAL_BATCH}: found {seqs}; a multiple of {LOCAL_BATCH} × replicas = {local * replicas * shards} is required"
        )
    if get_degree(given, PP) == 1:
        return {"layout.micro_batch_seqs": local, "job.global_batch_seqs": seqs}
    if seqs != local * replicas * shards:
        raise InputError(
            f"{GLOBAL_BATCH}: found {seqs}, for which the pipeline runs {seqs // (local * replicas * shards)} times and drains "
            f"between; {LOCAL_BATCH} × replicas = {local * replicas * shards} is what can be read"
        )
    return {"layout.micro_batch_seqs": micro, "job.global_batch_seqs": seqs}


def _step_options(launch: Launch) -> Options:
    job = launch.job
    return {"training.steps": max(round(job.tokens / job.global_batch_tokens), 1)} if job.tokens else {}


def _read_steps(given: OptionReader) -> Mapping[str, Any]:
    replicas, shards = read_replicas(given)
    every = given.get(GLOBAL_BATCH, -1)
    seqs = given.get(LOCAL_BATCH, 8) * replicas * shards if every < 0 else every
    steps = given.get("training.steps")
    return {"job.tokens": float(steps * seqs * given.get("training.seq_len", 2048))} if steps else {}


def read_dtypes(given: OptionReader) -> str:
    """The formats of weights and activations by the recipe that has them, products apart. Raises `InputError` for others."""
    whole, mixed = given.get(DTYPE, "float32"), given.get(PARAM_DTYPE, "bfloat16")
    given.get("training.mixed_precision_reduce")
    if whole != "float32":
        raise InputError(
            f"{DTYPE}: found {whole!r}, which keeps no fp32 copy of weights and moments; float32 is what can be read"
        )
    return DEFAULT_PRECISION if mixed == "bfloat16" else "fp32"


def dtype_options(launch: Launch) -> Options:
    """The same of a launch."""
    return {DTYPE: "float32", PARAM_DTYPE: "float32" if launch.job.precision == "fp32" else "bfloat16"}


def _refuse_offload(given: OptionReader) -> Mapping[str, Any]:
    if given.get(CPU_OFFLOAD, False):
        raise InputError(
            f"{CPU_OFFLOAD}: weights, gradients and moments rest on the host; no layout has that, false is required"
        )
    return {}


def sequence_divisor(launch: Launch) -> int:
    """What the length of a sequence must be a multiple of. Source: trainer.py 0.3.0, seq_len_divisor in 0.2.2."""
    layout = launch.layout
    return (layout.tp if layout.sequence_parallel else 1) * (2 * layout.cp if layout.cp > 1 else 1)


SHARED_MAPPINGS: tuple[OptionMapping, ...] = (
    OptionMapping(_sharding_options, _read_sharding),
    map_always("layout.tp", TP, 1),
    map_always("layout.cp", CP, 1),
    map_always("layout.pp", PP, 1),
    map_always("layout.ep", EP, 1),
    map_always("job.seq_len", "training.seq_len", 2048),
    OptionMapping(_batch_options, _read_batch),
    OptionMapping(_step_options, _read_steps),
    OptionMapping(lambda launch: {}, _refuse_offload),
    add_options("compile.enable", "compile.components", "compile.backend",
           say=lambda launch: {"compile.enable": True, "compile.components": ["model", "loss"]}),
)  # fmt: skip
SHARED_REQUIREMENTS: tuple[Requirement, ...] = (
    Requirement(
        lambda launch: launch.job.precision != "bf16",
        lambda launch: (
            f"precision bf16 reduces gradients in bf16, and torchtitan reduces them in fp32; precision={DEFAULT_PRECISION} "
            "is what it runs"
        ),
    ),
    Requirement(
        lambda launch: launch.model.num_heads % launch.layout.tp == launch.model.num_kv_heads % launch.layout.tp == 0,
        lambda launch: (
            f"tp = {launch.layout.tp} must divide num_heads = {launch.model.num_heads} and num_kv_heads = "
            f"{launch.model.num_kv_heads}"
        ),
    ),
    Requirement(
        lambda launch: launch.job.seq_len % sequence_divisor(launch) == 0,
        lambda launch: (
            f"seq_len = {launch.job.seq_len} is not a multiple of {sequence_divisor(launch)}: of tp with sequence "
            "parallelism, times 2·cp with context parallelism"
        ),
    ),
    Requirement(
        lambda launch: not (launch.model.tied_embeddings and launch.layout.pp > 1),
        lambda launch: (
            f"{launch.model.name} ties its embeddings, which no pipeline of torchtitan does; pp=1 is required"
        ),
    ),
    Requirement(
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
SINGLE_STAGE_SCHEDULES = ("1f1b", "afab")
FILLED_SCHEDULES = ("1f1b", "dualpipe_v")  # that take no fewer micro-batches than there are stages: the same file
MAX_STAGES = 10_000  # far above any pipeline
STAGE_SECTION = "parallelism"
FIRST_STAGE_LESS, LAST_STAGE_LESS = (
    f"{STAGE_SECTION}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")
)
LAYERS_PER_STAGE, SCHEDULE = (
    f"{STAGE_SECTION}.pipeline_parallel_layers_per_stage",
    f"{STAGE_SECTION}.pipeline_parallel_schedule",
)
STAGE_MODULES, SCHEDULE_CSV = (
    f"{STAGE_SECTION}.module_fqns_per_model_part",
    f"{STAGE_SECTION}.pipeline_parallel_schedule_csv",
)


def generate_stages(num_layers: int, num_stages: int, first: int, last: int) -> tuple[int, ...] | None:
    """Layers of each stage where the first counts `first` more and the last `last` more; None where torchtitan refuses."""
    per, extra = divmod(num_layers + first + last, num_stages)
    if num_stages < 2 or per < 1 or max(first, last) > per:
        return None
    layers = [per + (stage < extra) for stage in range(num_stages)]
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def map_stages(table: str, head: str) -> OptionMapping:
    """Schedule and stages of models of a table; `head` is what the release calls the output's projection."""
    return OptionMapping(lambda launch: _stage_options(launch, head), lambda given: _read_stages(given, table))


def _num_micro_batches(launch: Launch) -> int:
    layout = launch.layout
    return launch.job.num_seqs // (layout.dp * layout.fsdp * layout.micro_batch_seqs)


ENOUGH_MICRO_BATCHES = Requirement(
    lambda launch: (
        launch.layout.schedule not in FILLED_SCHEDULES
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
    stages, schedule = layers_by_virtual_stage(launch.model, layout), {SCHEDULE: SCHEDULES[layout.schedule]}
    for first, last in ((1, 1), (0, 0), (1, 0), (0, 1)):
        if generate_stages(sum(stages), len(stages), first, last) == stages:
            ends = {FIRST_STAGE_LESS: first, LAST_STAGE_LESS: last}
            if layout.num_virtual_stages == _default_stages_per_rank(layout.schedule):
                return {**schedule, **ends}
            per = -(-(sum(stages) + first + last) // len(stages))
            if _num_stages(sum(stages) + first + last, per) == len(stages):
                return {**schedule, **ends, LAYERS_PER_STAGE: per}
    return {**schedule, STAGE_MODULES: _stage_modules(stages, head)}


def _stage_modules(stages: tuple[int, ...], head: str) -> list[list[str]]:
    """The modules of each stage by name."""
    start, found = 0, []
    for layers in stages:
        found.append([f"layers.{layer}" for layer in range(start, start + layers)])
        start += layers
    found[0].insert(0, "tok_embeddings")
    found[-1] += ["norm", head]
    return found


def _default_stages_per_rank(schedule: str) -> int:
    """Stages on each rank where nothing says how many."""
    return 1 if schedule in SINGLE_STAGE_SCHEDULES else 2


def _num_stages(counted: int, per: int) -> int:
    return -(-counted // per)


def _read_stages(given: OptionReader, table: str) -> Mapping[str, Any]:
    ranks = given.get(f"{STAGE_SECTION}.pipeline_parallel_degree", 1)
    name, first, last = given.get(SCHEDULE, "1F1B"), given.get(FIRST_STAGE_LESS, 1), given.get(LAST_STAGE_LESS, 1)
    modules, per, actions = given.get(STAGE_MODULES), given.get(LAYERS_PER_STAGE), given.get(SCHEDULE_CSV, "")
    if ranks == 1:
        return {"layout.schedule": "none"}
    if actions:
        raise InputError(f"{SCHEDULE_CSV}: found {actions!r}; a schedule by name is what can be read")
    schedule = {theirs.casefold(): ours for ours, theirs in SCHEDULES.items()}.get(str(name).casefold())
    if schedule is None:
        raise InputError(f"{SCHEDULE}: {describe_unknown(str(name), SCHEDULES.values())}")
    layers = read_flavor(table, given).fields["model.num_layers"]
    if modules:
        stages = _layers_of_modules(modules, layers)
    else:
        count = _num_stages(layers + first + last, per) if per else ranks * _default_stages_per_rank(schedule)
        made = generate_stages(layers, count, first, last) if count <= MAX_STAGES else None
        if made is None:
            raise InputError(
                f"{STAGE_SECTION}: found {layers} layers on {count} stages; at least one on each is required"
            )
        stages = made
    if len(stages) % ranks or (schedule in SINGLE_STAGE_SCHEDULES) != (len(stages) == ranks):
        each = "one stage" if schedule in SINGLE_STAGE_SCHEDULES else "two or more stages"
        raise InputError(f"{SCHEDULE}: found {len(stages)} stages on {ranks} ranks; {name} has {each} on each rank")
    return {"layout.num_virtual_stages": len(stages) // ranks, "layout.stages": stages, "layout.schedule": schedule}


def _layers_of_modules(modules: object, layers: int) -> tuple[int, ...]:
    """How many layers lists of modules have. Raises `InputError` unless they are the model's in order."""
    if not isinstance(modules, (list, tuple)) or not all(isinstance(one, (list, tuple)) for one in modules):
        raise InputError(f"{STAGE_MODULES}: found {str(modules)[:80]!r}; a list of lists of module names is required")
    names = [[name for name in stage if str(name).startswith("layers.")] for stage in modules]
    if [name for stage in names for name in stage] != [f"layers.{layer}" for layer in range(layers)]:
        raise InputError(f"{STAGE_MODULES}: layers.0 to layers.{layers - 1} in order, each once, are required")
    return tuple(len(stage) for stage in names)
