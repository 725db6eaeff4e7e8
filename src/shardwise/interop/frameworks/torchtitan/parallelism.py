"""Options of both torchtitan releases for a layout and a batch: degrees, sharding, micro-batches and pipeline stages.

The layers of stages follow from how many layers embedding and head count for, from the layers of each stage, or from lists of
modules. Source: torchtitan 0.3.0, config/configs.py, distributed/parallel_dims.py and distributed/pipeline_parallel.py; 0.2.2,
config/job_config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.interop.frameworks.torchtitan.models import read_flavor
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.target import OptionMapping, OptionReader
from shardwise.interop.text_formats.option_tables import Options
from shardwise.layout import layers_by_virtual_stage
from shardwise.values import InputError, describe_unknown

SECTION = "parallelism"
REPLICATE, SHARD = f"{SECTION}.data_parallel_replicate_degree", f"{SECTION}.data_parallel_shard_degree"
TP, CP, PP, EP = (f"{SECTION}.{axis}_parallel_degree" for axis in ("tensor", "context", "pipeline", "expert"))
RESHARD_AFTER_FORWARD = f"{SECTION}.fsdp_reshard_after_forward"
LOAD_BALANCER = f"{SECTION}.context_parallel_load_balancer"
LOCAL_BATCH, GLOBAL_BATCH, MICRO_BATCH = (
    "training.local_batch_size", "training.global_batch_size", f"{SECTION}.pipeline_parallel_microbatch_size",
)  # fmt: skip
DTYPE, PARAM_DTYPE, CPU_OFFLOAD = "training.dtype", "training.mixed_precision_param", "training.enable_cpu_offload"
RESHARD_POLICIES = {2: "never", 3: "always"}  # by ZeRO stage: weights stay gathered, or are gathered again for backward
DEFAULT_PRECISION = "bf16_fp32_reduction"


def map_always(field: str, option: str, default: Any) -> OptionMapping:
    """Map a field to an option that is always written, even if it has the release's default."""
    return OptionMapping(
        lambda launch: {option: launch.fields()[field]}, lambda reader: {field: reader.get(option, default)}
    )


def _sharding_options(launch: Launch) -> Options:
    layout = launch.layout
    default_stage = _default_zero_stage(layout.fsdp * layout.cp, layout.pp)
    policy = "default" if layout.zero_stage == default_stage else RESHARD_POLICIES.get(layout.zero_stage, "default")
    return {REPLICATE: layout.dp, SHARD: layout.fsdp, RESHARD_AFTER_FORWARD: policy}


def _default_zero_stage(shards: int, pp: int) -> int:
    """Return the ZeRO stage of the default reshard policy: 0 for one shard, 2 in a pipeline (weights stay gathered), else 3."""
    return 0 if shards == 1 else 2 if pp > 1 else 3


def _read_sharding(reader: OptionReader) -> Mapping[str, Any]:
    replicas, shards = read_replicas(reader)
    policy = reader.get(RESHARD_AFTER_FORWARD, "default")
    stages = {"default": _default_zero_stage(shards * reader.get_degree(CP), reader.get_degree(PP)),
              **{name: stage for stage, name in RESHARD_POLICIES.items()}}  # fmt: skip
    if policy not in stages:
        raise InputError(f"{RESHARD_AFTER_FORWARD}: found {policy!r}; one of {', '.join(stages)} is required")
    return {"layout.dp": replicas, "layout.fsdp": shards, "layout.zero_stage": stages[policy]}


def read_replicas(reader: OptionReader) -> tuple[int, int]:
    """Return replicas and shards of each; -1 shards take all remaining devices. Raises `InputError` if they do not fit."""
    replicas, shards, devices = reader.get_degree(REPLICATE), reader.get(SHARD, -1), reader.machines.num_devices
    model_parallel = replicas * reader.get_degree(TP) * reader.get_degree(CP) * reader.get_degree(PP)
    if not isinstance(shards, int) or isinstance(shards, bool) or (shards != -1 and shards < 1):
        raise InputError(
            f"{SHARD}: found {shards!r}; a whole number of at least 1, or -1 for all that are left, is required"
        )
    num_shards = devices // model_parallel if shards == -1 else shards
    if num_shards * model_parallel != devices:
        raise InputError(
            f"{SECTION}: replicas, tensor, context and pipeline parallelism take {model_parallel} devices together"
            + (f" and {shards} shards of them {model_parallel * shards}" if shards != -1 else "")
            + f", found {devices}; a cluster that they divide is required"
        )
    return replicas, num_shards


def _batch_options(launch: Launch) -> Options:
    """Return batch sizes. A pipeline splits a rank's batch of a step into micro-batches; without one it is a micro-batch."""
    layout, seqs = launch.layout, launch.job.num_seqs
    local_batch = seqs // layout.num_replicas if layout.pp > 1 else layout.micro_batch_seqs
    micro_batch = layout.micro_batch_seqs if layout.pp > 1 else 1
    return {LOCAL_BATCH: local_batch, GLOBAL_BATCH: seqs, MICRO_BATCH: micro_batch}


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    replicas, shards = read_replicas(reader)
    local_batch, global_batch = reader.get(LOCAL_BATCH, 8), reader.get(GLOBAL_BATCH, -1)
    micro_batch = reader.get(MICRO_BATCH, 1)
    seqs = local_batch * replicas * shards if global_batch < 0 else global_batch
    if local_batch < 1 or seqs % (local_batch * replicas * shards):
        raise InputError(
            f"{GLOBAL_BATCH}: found {seqs}; a multiple of {LOCAL_BATCH} × replicas = {local_batch * replicas * shards} is "
            "required"
        )
    if reader.get_degree(PP) == 1:
        return {"layout.micro_batch_seqs": local_batch, "job.global_batch_seqs": seqs}
    if seqs != local_batch * replicas * shards:
        raise InputError(
            f"{GLOBAL_BATCH}: found {seqs}, for which the pipeline runs {seqs // (local_batch * replicas * shards)} times and "
            f"drains between; {LOCAL_BATCH} × replicas = {local_batch * replicas * shards} is what can be read"
        )
    return {"layout.micro_batch_seqs": micro_batch, "job.global_batch_seqs": seqs}


def _step_options(launch: Launch) -> Options:
    return {"training.steps": launch.num_steps} if launch.num_steps else {}


def _read_steps(reader: OptionReader) -> Mapping[str, Any]:
    replicas, shards = read_replicas(reader)
    global_batch = reader.get(GLOBAL_BATCH, -1)
    seqs = reader.get(LOCAL_BATCH, 8) * replicas * shards if global_batch < 0 else global_batch
    steps = reader.get("training.steps")
    return {"job.tokens": float(steps * seqs * reader.get("training.seq_len", 2048))} if steps else {}


def read_dtypes(reader: OptionReader) -> str:
    """Return the precision recipe of weights and activations, apart from matmuls. Raises `InputError` for other dtypes."""
    dtype, param_dtype = reader.get(DTYPE, "float32"), reader.get(PARAM_DTYPE, "bfloat16")
    reader.acknowledge("training.mixed_precision_reduce")
    if dtype != "float32":
        raise InputError(
            f"{DTYPE}: found {dtype!r}, which keeps no fp32 copy of weights and moments; float32 is what can be read"
        )
    return DEFAULT_PRECISION if param_dtype == "bfloat16" else "fp32"


def dtype_options(launch: Launch) -> Options:
    """Return the dtypes of weights and activations of a launch."""
    return {DTYPE: "float32", PARAM_DTYPE: "float32" if launch.job.precision == "fp32" else "bfloat16"}


def _refuse_offload(reader: OptionReader) -> Mapping[str, Any]:
    if reader.get(CPU_OFFLOAD, False):
        raise InputError(
            f"{CPU_OFFLOAD}: weights, gradients and moments rest on the host; no layout has that, false is required"
        )
    return {}


def _read_compile(reader: OptionReader) -> Mapping[str, Any]:
    """Return no fields; note a model that is not compiled, which is torchtitan's default and not what its stack is fitted to."""
    reader.acknowledge("compile.backend")
    if not reader.get("compile.enable", False) or "model" not in reader.get("compile.components", ["model", "loss"]):
        reader.notes.append(
            "the model is not compiled, and is priced as if it were: it is slower than here, and takes more memory"
        )
    return {}


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
    OptionMapping(lambda launch: {"compile.enable": True, "compile.components": ["model", "loss"]}, _read_compile),
)  # fmt: skip
# Names of torch.distributed.pipelining, schedules.py (get_schedule_class). Schedules with several stages per rank default to two.
SCHEDULES = {
    "1f1b": "1F1B", "afab": "GPipe", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS",
    "interleaved_zb": "InterleavedZeroBubble", "zb_v": "ZBVZeroBubble", "dualpipe_v": "DualPipeV",
}  # fmt: skip
SINGLE_STAGE_SCHEDULES = ("1f1b", "afab")
MAX_STAGES = 10_000  # far above any pipeline
FIRST_STAGE_LESS, LAST_STAGE_LESS = (
    f"{SECTION}.pipeline_parallel_{end}_stage_less_layers" for end in ("first", "last")
)
LAYERS_PER_STAGE = f"{SECTION}.pipeline_parallel_layers_per_stage"
SCHEDULE, SCHEDULE_CSV = f"{SECTION}.pipeline_parallel_schedule", f"{SECTION}.pipeline_parallel_schedule_csv"
STAGE_MODULES = f"{SECTION}.module_fqns_per_model_part"


def generate_stages(num_layers: int, num_stages: int, first: int, last: int) -> tuple[int, ...] | None:
    """Return the layers of each stage if embedding counts for `first` layers and head for `last`; None if torchtitan refuses."""
    layers_per_stage, extra = divmod(num_layers + first + last, num_stages)
    if num_stages < 2 or layers_per_stage < 1 or max(first, last) > layers_per_stage:
        return None
    layers = [layers_per_stage + (stage < extra) for stage in range(num_stages)]
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def map_stages(table: str, head: str) -> OptionMapping:
    """Map schedule and stages of the models in a table; `head` is the release's name of the output projection."""
    return OptionMapping(lambda launch: _stage_options(launch, head), lambda reader: _read_stages(reader, table))


def _stage_options(launch: Launch, head: str) -> Options:
    layout = launch.layout
    if layout.pp == 1 or layout.schedule not in SCHEDULES:
        return {}
    stages, schedule = layers_by_virtual_stage(launch.model, layout), {SCHEDULE: SCHEDULES[layout.schedule]}
    # torchtitan's default (1, 1) first, then the other splits that options express; lists of modules only if none of them fits.
    for first, last in ((1, 1), (0, 0), (1, 0), (0, 1)):
        if generate_stages(sum(stages), len(stages), first, last) == stages:
            ends = {FIRST_STAGE_LESS: first, LAST_STAGE_LESS: last}
            if layout.num_virtual_stages == _default_stages_per_rank(layout.schedule):
                return {**schedule, **ends}
            layers_per_stage = -(-(sum(stages) + first + last) // len(stages))
            if _num_stages(sum(stages) + first + last, layers_per_stage) == len(stages):
                return {**schedule, **ends, LAYERS_PER_STAGE: layers_per_stage}
    return {**schedule, STAGE_MODULES: _stage_modules(stages, head)}


def _stage_modules(stages: tuple[int, ...], head: str) -> list[list[str]]:
    """Return the names of each stage's modules."""
    start, modules = 0, []
    for layers in stages:
        modules.append([f"layers.{layer}" for layer in range(start, start + layers)])
        start += layers
    modules[0].insert(0, "tok_embeddings")
    modules[-1] += ["norm", head]
    return modules


def _default_stages_per_rank(schedule: str) -> int:
    """Return the default number of stages on each rank."""
    return 1 if schedule in SINGLE_STAGE_SCHEDULES else 2


def _num_stages(num_layers: int, layers_per_stage: int) -> int:
    return -(-num_layers // layers_per_stage)


def _read_stages(reader: OptionReader, table: str) -> Mapping[str, Any]:
    ranks = reader.get(PP, 1)
    name, first, last = reader.get(SCHEDULE, "1F1B"), reader.get(FIRST_STAGE_LESS, 1), reader.get(LAST_STAGE_LESS, 1)
    modules, layers_per_stage = reader.get(STAGE_MODULES), reader.get(LAYERS_PER_STAGE)
    actions = reader.get(SCHEDULE_CSV, "")
    if ranks == 1:
        return {"layout.schedule": "none"}
    if actions:
        raise InputError(f"{SCHEDULE_CSV}: found {actions!r}; a schedule by name is what can be read")
    schedule = {theirs.casefold(): ours for ours, theirs in SCHEDULES.items()}.get(str(name).casefold())
    if schedule is None:
        raise InputError(f"{SCHEDULE}: {describe_unknown(str(name), SCHEDULES.values())}")
    layers = read_flavor(table, reader).fields["model.num_layers"]
    if modules:
        stages = _layers_of_modules(modules, layers)
    else:
        count = ranks * _default_stages_per_rank(schedule)
        if layers_per_stage:
            count = _num_stages(layers + first + last, layers_per_stage)
        generated = generate_stages(layers, count, first, last) if count <= MAX_STAGES else None
        if generated is None:
            raise InputError(f"{SECTION}: found {layers} layers on {count} stages; at least one on each is required")
        stages = generated
    if len(stages) % ranks or (schedule in SINGLE_STAGE_SCHEDULES) != (len(stages) == ranks):
        required = "one stage" if schedule in SINGLE_STAGE_SCHEDULES else "two or more stages"
        raise InputError(f"{SCHEDULE}: found {len(stages)} stages on {ranks} ranks; {name} has {required} on each rank")
    return {"layout.num_virtual_stages": len(stages) // ranks, "layout.stages": stages, "layout.schedule": schedule}


def _layers_of_modules(modules: object, layers: int) -> tuple[int, ...]:
    """Return how many layers each list of modules has. Raises `InputError` unless they are the model's, in order."""
    if not isinstance(modules, (list, tuple)) or not all(isinstance(stage, (list, tuple)) for stage in modules):
        raise InputError(f"{STAGE_MODULES}: found {str(modules)[:80]!r}; a list of lists of module names is required")
    names = [[name for name in stage if str(name).startswith("layers.")] for stage in modules]
    if [name for stage in names for name in stage] != [f"layers.{layer}" for layer in range(layers)]:
        raise InputError(f"{STAGE_MODULES}: layers.0 to layers.{layers - 1} in order, each once, are required")
    return tuple(len(stage) for stage in names)
