"""NeMo Automodel: a recipe in YAML for a model on the Hugging Face hub.

Source of names and types: nemo-automodel 0.7.0, components/distributed/{config,mesh}.py, distributed/pipelining, recipes/llm,
components/loss, components/quantization/fp8.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardwise.interop.frameworks.huggingface_hub_names import hub_model, hub_name
from shardwise.interop.frameworks.trainers.adapter_options import (
    adapter_fields,
    expand_patterns,
    quantization_options,
    quantized_precision,
)
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import is_true, torchrun_command
from shardwise.interop.launches.target import (
    LaunchFiles,
    OptionMapping,
    OptionReader,
    Requirement,
    Target,
    add_options,
    map_flag,
    map_names,
)
from shardwise.interop.text_formats.config_trees import find_yaml, flatten, format_yaml, parse_yaml
from shardwise.interop.text_formats.option_tables import Options, option_table
from shardwise.model import Architecture
from shardwise.model.adapters import EXPERT_MODULES, LORA_MODULES
from shardwise.values import InputError, describe_unknown

SECTION = "distributed"
PIPELINE = f"{SECTION}.pipeline"
SCHEDULES = {"1f1b": "1F1B", "afab": "GPipe", "interleaved": "Interleaved1F1B", "looped_bfs": "LoopedBFS"}
RECOMPUTE = {"none": False, "full": True, "alternate": "selective"}


def _replica_options(launch: Launch) -> Options:
    """Return options of replicas: DDP without shards, or FSDP2, which reshards weights after forward (ZeRO-3) or not (ZeRO-2)."""
    layout = launch.layout
    replicas = layout.num_replicas
    if not layout.zero_stage and replicas > 1:
        return {"distributed.strategy": "ddp"}
    copies = {"distributed.dp_replicate_size": layout.dp} if layout.dp > 1 else {}
    resharding = {"distributed.reshard_after_forward": layout.zero_stage == 3} if layout.zero_stage else {}
    return {"distributed.strategy": "fsdp2", "distributed.dp_size": replicas, **copies, **resharding}


def read_replicas(reader: OptionReader) -> int:
    """Return how many groups of devices have sequences of their own. Raises `InputError` if degrees do not divide the cluster."""
    split = 1
    for axis in ("tp", "pp", "cp"):
        split *= reader.get_degree(f"{SECTION}.{axis}_size")
    if reader.machines.num_devices % split:
        raise InputError(
            f"tp_size·pp_size·cp_size = {split} does not divide {reader.machines.num_devices} devices; give the launch's cluster"
        )
    return reader.get_degree(f"{SECTION}.dp_size", reader.machines.num_devices // split)


def _read_layout_replicas(reader: OptionReader) -> Mapping[str, Any]:
    replicas, strategy = read_replicas(reader), str(reader.get(f"{SECTION}.strategy", "fsdp2")).lower()
    copies, cp = reader.get_degree(f"{SECTION}.dp_replicate_size"), reader.get_degree(f"{SECTION}.cp_size")
    if strategy not in ("fsdp2", "ddp") or replicas % copies:
        raise InputError(
            f"{SECTION}.strategy: found {strategy!r} with {replicas} replicas in {copies} copies; fsdp2 or ddp, and a divisor, "
            "are what can be read"
        )
    reshards = reader.get(f"{SECTION}.reshard_after_forward")
    if strategy == "ddp" or replicas * cp == copies:
        return {"layout.dp": replicas, "layout.zero_stage": 0}
    keeps_gathered = reader.get_degree(f"{SECTION}.pp_size") > 1 if reshards is None else not reshards
    return {"layout.dp": copies, "layout.fsdp": replicas // copies, "layout.zero_stage": 2 if keeps_gathered else 3}


def _stage_options(launch: Launch) -> Options:
    layout = launch.layout
    if layout.pp == 1:
        return {}
    stages = layout.pp * layout.num_virtual_stages
    schedule = {f"{PIPELINE}.pp_schedule": SCHEDULES[layout.schedule]} if layout.schedule in SCHEDULES else {}
    return {**schedule, f"{PIPELINE}.pp_microbatch_size": layout.micro_batch_seqs,
            f"{PIPELINE}.layers_per_stage": -(-launch.model.num_layers // stages),
            f"{PIPELINE}.round_virtual_stages_to_pp_multiple": "up"}  # fmt: skip


def _read_stages(reader: OptionReader) -> Mapping[str, Any]:
    """Return the stages' layers, split as by `generate_hf_model_fqn_per_model_part`: the first stages take the remainder."""
    ranks = reader.get_degree(f"{SECTION}.pp_size")
    schedules = {theirs.lower(): ours for ours, theirs in SCHEDULES.items()}
    name = str(reader.get(f"{PIPELINE}.pp_schedule", "1f1b")).replace("_", "").lower()
    reader.acknowledge(f"{PIPELINE}.pp_microbatch_size")
    if ranks == 1:
        return {"layout.schedule": "none"}
    if name not in schedules or reader.model is None:
        raise InputError(
            f"{PIPELINE}.pp_schedule: found {name!r}; one of {', '.join(SCHEDULES.values())} is what can be read"
        )
    ours = schedules[name]
    stages = _read_num_stages(reader, reader.model.num_layers, ranks, 1 if ours in ("1f1b", "afab") else 2)
    layers_per_stage, remainder = divmod(reader.model.num_layers, stages)
    return {"layout.schedule": ours, "layout.num_virtual_stages": stages // ranks,
            "layout.stages": tuple(layers_per_stage + (i < remainder) for i in range(stages))}  # fmt: skip


def _read_num_stages(reader: OptionReader, layers: int, ranks: int, default_per_rank: int) -> int:
    """Return the number of stages from the layers of each, or from the schedule's default, rounded as the recipe says.

    Raises `InputError` if it is not a multiple of the ranks.
    """
    layers_per_stage = reader.get(f"{PIPELINE}.layers_per_stage")
    rounding = reader.get(f"{PIPELINE}.round_virtual_stages_to_pp_multiple")
    stages: int = -(-layers // layers_per_stage) if layers_per_stage else ranks * default_per_rank
    if stages % ranks and rounding in ("up", "down"):
        stages += -(stages % ranks) + (ranks if rounding == "up" else 0)
    if stages % ranks or not 0 < stages <= layers:
        raise InputError(
            f"{PIPELINE}.layers_per_stage: found {layers_per_stage}: {stages} stages of {layers} layers; a multiple of "
            f"{ranks} is required"
        )
    return stages


def _read_experts(reader: OptionReader) -> Mapping[str, Any]:
    """Return the degrees of experts, which are never split: ranks of tensor parallelism hold whole experts."""
    ep = reader.get_degree(f"{SECTION}.ep_size")
    return {"layout.ep": ep, "layout.etp": 1 if ep > 1 and reader.get_degree(f"{SECTION}.tp_size") > 1 else None}


def _map_degree(axis: str) -> OptionMapping:
    """Map a degree, which is written if it is above 1."""
    name = f"{SECTION}.{axis}_size"

    def write_degree(launch: Launch) -> Options:
        degree = getattr(launch.layout, axis)
        return {name: degree} if degree > 1 else {}

    return OptionMapping(write_degree, lambda reader: {f"layout.{axis}": reader.get_degree(name)})


LAYOUT_MAPPINGS: tuple[OptionMapping, ...] = (
    OptionMapping(_replica_options, _read_layout_replicas),
    *(_map_degree(axis) for axis in ("tp", "cp", "pp")),
    OptionMapping(lambda launch: {f"{SECTION}.ep_size": launch.layout.ep} if launch.layout.ep > 1 else {}, _read_experts),
    map_flag("layout.sequence_parallel", f"{SECTION}.sequence_parallel"),
    map_flag("layout.async_tp", f"{SECTION}.enable_async_tensor_parallel"),
    OptionMapping(lambda launch: {}, lambda reader: {"layout.cp_variant": "all_gather"}),
    map_names("layout.recompute", f"{SECTION}.activation_checkpointing", RECOMPUTE, False),
    OptionMapping(_stage_options, _read_stages),
)  # fmt: skip

PRECISION_POLICY = f"{SECTION}.mp_policy"
POLICY_DTYPES = (f"{PRECISION_POLICY}.param_dtype", f"{PRECISION_POLICY}.reduce_dtype")
MODEL_NAME_OPTIONS = ("model.config.pretrained_model_name_or_path", "model.pretrained_model_name_or_path")
LOSSES = {
    "unfused": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy",
    "fused": "nemo_automodel.components.loss.te_parallel_ce.TEParallelCrossEntropy",
    "chunked": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy",
}
# fp32 weights that are computed in bf16 have gradients reduced in either dtype. Weights stored in bf16 have no master copy
# (components/distributed/config.py, FSDP2Config.mp_policy).
REDUCTION_DTYPES = {"bf16_fp32_reduction": "float32", "bf16": "bfloat16"}
FP8_RECIPES = {"fp8_torchao": "tensorwise", "fp8_torchao_rowwise": "rowwise"}
FP32_NAMES = {"float32": "float32", "fp32": "float32", "torch.float32": "float32", "float": "float32"}


def _model_options(launch: Launch) -> Options:
    return {"model._target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_config",
            "model.config._target_": "transformers.AutoConfig.from_pretrained",
            MODEL_NAME_OPTIONS[0]: hub_name(launch.model) or ""}  # fmt: skip


def _batch_options(launch: Launch) -> Options:
    """Return batch sizes. A replica's local batch is one micro-batch, or all that pass the pipeline's stages before an update."""
    layout, seqs = launch.layout, launch.job.num_seqs
    local = seqs // layout.num_replicas if layout.pp > 1 else layout.micro_batch_seqs
    batch = {"step_scheduler.global_batch_size": seqs, "step_scheduler.local_batch_size": local}
    return {**batch, "dataset.batch_size": local}


def _read_batch(reader: OptionReader) -> Mapping[str, Any]:
    seqs = reader.get_degree("step_scheduler.global_batch_size", 32)
    local = reader.get_degree("step_scheduler.local_batch_size")
    reader.acknowledge("dataset.batch_size")
    if reader.get_degree(f"{SECTION}.pp_size") == 1:
        return {"job.global_batch_seqs": seqs, "layout.micro_batch_seqs": local}
    replicas = read_replicas(reader)
    if seqs % (local * replicas):
        raise InputError(
            f"step_scheduler: global_batch_size = {seqs} is not a multiple of local_batch_size × replicas = {local} × {replicas}"
        )
    if seqs > local * replicas:
        reader.notes.append(
            f"the pipeline is filled {seqs // (local * replicas)} times for an update, and is priced as filled once: its bubble "
            "is larger than here"
        )
    micro_batch = reader.get_degree(f"{SECTION}.pipeline.pp_microbatch_size")
    return {"job.global_batch_seqs": seqs, "layout.micro_batch_seqs": micro_batch}


def _precision_options(launch: Launch) -> Options:
    precision = launch.job.precision
    if quantization := quantization_options(precision, "quantization.", "bnb_4bit_use_double_quant"):
        return quantization
    recipe = {"fp8.enabled": True, "fp8.recipe_name": FP8_RECIPES[precision]} if precision in FP8_RECIPES else {}
    gathered = {"fp8.enable_fsdp_float8_all_gather": True} if precision == "fp8_torchao" else {}
    policy = {f"{PRECISION_POLICY}._target_": "torch.distributed.fsdp.MixedPrecisionPolicy",
              f"{PRECISION_POLICY}.param_dtype": "bfloat16",
              f"{PRECISION_POLICY}.reduce_dtype": REDUCTION_DTYPES.get(precision, "float32")}  # fmt: skip
    return {"model.torch_dtype": "float32", **(policy if launch.layout.zero_stage else {}), **recipe, **gathered}


def _read_precision(reader: OptionReader) -> Mapping[str, Any]:
    """Return the precision. Weights stored in bf16 have bf16 moments too; the nearest recipe keeps moments in fp32."""
    quantized = quantized_precision(
        four_bits=is_true(reader.get("quantization.load_in_4bit", False)),
        eight_bits=is_true(reader.get("quantization.load_in_8bit", False)),
        double=is_true(reader.get("quantization.bnb_4bit_use_double_quant", False)),
    )
    if quantized:
        reader.acknowledge("model.torch_dtype", *POLICY_DTYPES)
        return {"job.precision": quantized}
    names = {recipe: ours for ours, recipe in FP8_RECIPES.items()}
    if reader.get("fp8.enabled", False) and reader.get("fp8.recipe_name", "tensorwise") in names:
        reader.acknowledge("model.torch_dtype", "fp8.enable_fsdp_float8_all_gather", *POLICY_DTYPES)
        return {"job.precision": names[reader.get("fp8.recipe_name", "tensorwise")]}
    if str(reader.options.get("model.torch_dtype", "")) not in FP32_NAMES:
        return {"job.precision": "bf16_no_master"}
    reader.acknowledge("model.torch_dtype")
    _, reduced = (reader.get(name, "float32") for name in POLICY_DTYPES)
    reduced = str(reduced).removeprefix("torch.")
    return {"job.precision": "bf16" if reduced in ("bfloat16", "bf16") else "bf16_fp32_reduction"}


def _read_length(reader: OptionReader) -> Mapping[str, Any]:
    names = ("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length")
    lengths = [reader.get(name) for name in names]
    length = next((candidate for candidate in lengths if isinstance(candidate, int) and candidate > 0), None)
    return {} if length is None else {"job.seq_len": length}


OPTIMIZERS = {"adamw": "torch.optim.AdamW"}
# Classes that recipes name, by our optimizer. Adam differs from AdamW in where decay is added, in no cost.
OPTIMIZER_CLASSES: Mapping[str, str] = {
    "torch.optim.AdamW": "adamw", "torch.optim.Adam": "adamw", "torch.optim.SGD": "sgd",
    "torch.optim.Adafactor": "adafactor", "torch.optim.Muon": "muon", "dion.Muon": "muon",
    "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam": "adamw",
    "transformer_engine.pytorch.optimizers.FusedAdam": "adamw", "apex.optimizers.FusedAdam": "adamw",
    "torchao.optim.AdamW8bit": "adamw_8bit", "bitsandbytes.optim.AdamW8bit": "adamw_8bit",
    "bitsandbytes.optim.PagedAdamW8bit": "adamw_8bit",
}  # fmt: skip
# Arguments of TE's FusedAdam that change what it keeps: weights' lower halves, and the dtypes of its moments.
STATE_ARGUMENTS = (
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "store_param_remainders",
    "master_weight_dtype",
    "master_weights",
)


def _read_optimizer(reader: OptionReader) -> Mapping[str, Any]:
    """Return the optimizer of the class that the recipe names; AdamW without one."""
    name = reader.get("optimizer._target_", OPTIMIZERS["adamw"])
    if name not in OPTIMIZER_CLASSES:
        raise InputError(f"optimizer._target_: {describe_unknown(str(name), OPTIMIZER_CLASSES)}")
    states = [argument for argument in STATE_ARGUMENTS if reader.get(f"optimizer.{argument}") not in (None, False)]
    if states:
        reader.notes.append(
            f"optimizer: {', '.join(states)} of {name.rpartition('.')[2]} are priced as the recipe's precision has them"
        )
    return {"job.optimizer": OPTIMIZER_CLASSES[name]}


def _adapter_options(launch: Launch) -> Options:
    model = launch.model
    patterns = [f"*.{module}" for module in sorted(model.structure.lora_targets)]
    names = {
        "_target_": "nemo_automodel.components._peft.lora.PeftConfig",
        "dim": model.lora_rank,
        "target_modules": patterns,
    }
    return {f"peft.{name}": value for name, value in names.items()} if model.lora_rank else {}


def _read_adapters(reader: OptionReader) -> Mapping[str, Any]:
    """Return the adapters of `peft`: of the modules that its patterns match, or all linear ones but the excluded."""
    if not any(name.startswith("peft.") for name in reader.options):
        return {}
    rank = reader.get_count("peft.dim", 8)
    included, excluded = reader.get("peft.target_modules"), reader.get("peft.exclude_modules")
    everything = bool(reader.get("peft.match_all_linear", False))
    reader.acknowledge(
        *(f"peft.{name}" for name in ("_target_", "alpha", "dropout", "use_triton", "use_memory_efficient_lora"))
    )
    if included:
        return adapter_fields(rank, expand_patterns(included, "peft.target_modules"))
    if not (everything or excluded):
        return adapter_fields(rank, expand_patterns("*_proj", "peft.target_modules"))
    if everything or not any("lm_head" in str(pattern) for pattern in excluded):
        reader.notes.append("peft: the adapter of the head is left out of the price")
    skipped = expand_patterns(excluded, "peft.exclude_modules") if excluded else ()
    linear = [module for module in LORA_MODULES if module not in (*EXPERT_MODULES, *skipped)]
    return adapter_fields(rank, linear)


def _step_options(launch: Launch) -> Options:
    return {"step_scheduler.max_steps": launch.num_steps} if launch.num_steps else {}


def _read_steps(reader: OptionReader) -> Mapping[str, Any]:
    steps = reader.get("step_scheduler.max_steps")
    seqs = reader.get_degree("step_scheduler.global_batch_size", 32)
    length = _read_length(reader).get("job.seq_len", reader.user_fields.get("job.seq_len"))
    return {"job.tokens": float(steps * seqs * length)} if steps and length else {}


MAPPINGS: tuple[OptionMapping, ...] = (
    add_options("model._target_", "model.config._target_", *MODEL_NAME_OPTIONS, to_options=_model_options),
    OptionMapping(_precision_options, _read_precision),
    *LAYOUT_MAPPINGS,
    OptionMapping(_batch_options, _read_batch),
    OptionMapping(lambda launch: {"dataset.seq_len": launch.job.seq_len}, _read_length),
    OptionMapping(_step_options, _read_steps),
    map_names("job.loss", "loss_fn._target_", LOSSES),
    OptionMapping(lambda launch: {"optimizer._target_": OPTIMIZERS[launch.job.optimizer]} if launch.job.optimizer in OPTIMIZERS
                  else {}, _read_optimizer),
    OptionMapping(_adapter_options, _read_adapters),
)  # fmt: skip

RECIPE_FILE = "recipe.yaml"


def _model_name(options: Options) -> str | None:
    return next((options[name] for name in MODEL_NAME_OPTIONS if isinstance(options.get(name), str)), None)


def _find_model(options: Options) -> Architecture | None:
    name = _model_name(options)
    return hub_model(name) if name else None


def _write_files(options: Options, launch: Launch) -> LaunchFiles:
    recipe_options = {
        "recipe": "TrainFinetuneRecipeForNextTokenPrediction",
        **options,
        "dataset._target_": "nemo_automodel.components.datasets.llm.mock_iterable_dataset.MockIterableDataset",
        "dataset.vocab_size": launch.model.vocab_size,
        "dataloader._target_": "torch.utils.data.DataLoader",
        "dataloader.batch_size": None,
        "optimizer.lr": 3.0e-4,
        "checkpoint.enabled": False,
    }
    return {RECIPE_FILE: format_yaml(recipe_options)}


def _read_files(files: LaunchFiles) -> Options:
    name, text = find_yaml(files, "a recipe of NeMo Automodel")
    options = flatten(parse_yaml(text, name), option_table("automodel"))
    return options


def _notes(launch: Launch) -> Iterator[str]:
    yield "data is mock, and the learning rate one of many: set dataset, optimizer and checkpoint in the recipe"


TARGET = Target(
    name="automodel", title="NeMo Automodel", version="0.7.0",
    source="https://github.com/NVIDIA-NeMo/Automodel, nemo_automodel/components/distributed/config.py", stack="automodel",
    options_file="automodel", mappings=MAPPINGS,
    requirements=(
        Requirement(
            lambda launch: hub_name(launch.model) is not None,
            lambda launch: f"{launch.model.name} has no name on the Hugging Face hub, by which models are built; take another",
            reads_model=True,
        ),
        Requirement(
            lambda launch: not launch.model.structure.lora_targets & {*EXPERT_MODULES, "router"},
            lambda launch: "adapters of experts have other ranks, and routers none; lora_targets without them are required",
            reads_model=True,
        ),
    ),
    write=_write_files, read=_read_files,
    command=lambda launch: torchrun_command(launch.machines, f"-m nemo_automodel.cli.app {RECIPE_FILE}"),
    notes=_notes, model_name=_model_name, find_model=_find_model, includes_model=False,
)  # fmt: skip
