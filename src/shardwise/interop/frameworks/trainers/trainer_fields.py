"""Fields that trainers on top of transformers share: sharding of a job, number formats, batches, and refused objectives.

Sources: transformers 5.23, trainer.py and integrations/deepspeed.py; Accelerate 1.15, accelerator.py and utils/fsdp_utils.py;
deepspeed_configs of Axolotl and examples/deepspeed of LLaMA-Factory, whose files are known by their names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.interop.frameworks.huggingface_hub_names import hub_model
from shardwise.interop.launches.launch import Launch
from shardwise.interop.launches.launch_scripts import OPTIMIZERS, is_true
from shardwise.interop.launches.target import LaunchFiles, OptionMapping, OptionReader, Target
from shardwise.interop.text_formats.config_trees import flatten, parse_json
from shardwise.interop.text_formats.option_tables import Options
from shardwise.model import Architecture
from shardwise.values import InputError, describe_unknown
from shardwise.values.input_texts import parse_integer

# Prefix of options that a referred DeepSpeed configuration has: its file, if it is given, else what its name says.
DEEPSPEED = "deepspeed_config."
STAGE, OPTIMIZER_DEVICE, WEIGHT_DEVICE = (
    f"{DEEPSPEED}zero_optimization.{name}" for name in ("stage", "offload_optimizer.device", "offload_param.device")
)
_STAGE_IN_NAME = re.compile(r"(?:^|[/_])(?:ds_)?z(?:ero)?_?([0-3])(?=[_.]|$)")
_OBJECTIVES = "preference tuning and reinforcement learning run further models or generate, and are not priced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How a trainer shards: the ZeRO stage (0: DDP), which software does, copies of the shards, and degrees."""

    zero_stage: int
    software: str  # "ddp", "fsdp" or "deepspeed"
    copies: int = 1
    tp: int = 1
    cp: int = 1


def sharding_fields(reader: OptionReader, sharding: Sharding) -> Mapping[str, Any]:
    """Return the layout's fields of a sharding. Raises `InputError` where the degrees do not divide the devices."""
    replicas = num_replicas(reader, sharding)
    stage = sharding.zero_stage if replicas * sharding.cp > 1 else 0  # one device has nothing to shard
    copies = sharding.copies if stage else replicas
    return {
        "layout.tp": sharding.tp, "layout.cp": sharding.cp, "layout.dp": copies, "layout.fsdp": replicas // copies,
        "layout.zero_stage": stage, "layout.sequence_parallel": False,
    }  # fmt: skip


def num_replicas(reader: OptionReader, sharding: Sharding) -> int:
    """Return how many groups of devices have sequences of their own."""
    devices, model_parallel = reader.machines.num_devices, sharding.tp * sharding.cp
    if devices % (model_parallel * sharding.copies):
        raise InputError(
            f"tensor parallelism {sharding.tp} × context parallelism {sharding.cp} × copies {sharding.copies} do not divide "
            f"{devices} devices; give the cluster of the launch"
        )
    return devices // model_parallel


def batch_fields(
    reader: OptionReader, sharding: Sharding, micro_batch: int, steps: int, seq_len: int
) -> Mapping[str, Any]:
    """Return the fields of a batch of `steps` micro-batches for each replica, with the tokens of `max_steps`, if any."""
    seqs = micro_batch * steps * num_replicas(reader, sharding)
    max_steps = reader.get_count("max_steps") if reader.get("max_steps") not in (None, -1, 0) else None
    tokens = {"job.tokens": float(max_steps * seqs * seq_len)} if max_steps else {}
    return {"layout.micro_batch_seqs": micro_batch, "job.global_batch_seqs": seqs, "job.seq_len": seq_len, **tokens}


def require_supervised(options: Options, objectives: Mapping[str, Sequence[str]]) -> None:
    """Raise `InputError` for a job of another kind; `objectives` has by option the values of supervised training."""
    for name, supervised in objectives.items():
        value = options.get(name)
        if value not in (None, False, "") and str(value) not in supervised:
            raise InputError(
                f"{name}: found {str(value)[:60]!r}: {_OBJECTIVES}; a launch of supervised fine-tuning or pre-training is "
                "required"
            )


def read_deepspeed(reference: Any, files: LaunchFiles) -> dict[str, Any]:
    """Return the options of a DeepSpeed configuration that a launch refers to: a file that is given, a mapping, or a name.

    Raises `InputError` for a name that does not say the stage.
    """
    if isinstance(reference, Mapping):
        return flatten({DEEPSPEED[:-1]: reference})
    name = str(reference).rpartition("/")[2]
    if name in files:
        return flatten({DEEPSPEED[:-1]: parse_json(files[name], name)})
    match = _STAGE_IN_NAME.search(str(reference).lower())
    if match is None:
        raise InputError(f"deepspeed: refers to {str(reference)[:80]!r}, which is not given; give this file too")
    offloads = "offload" in name.lower()
    weights_only = "offload_params" in name.lower()
    return {
        STAGE: parse_integer(match[1]),
        **({OPTIMIZER_DEVICE: "cpu"} if offloads and not weights_only else {}),
        **({WEIGHT_DEVICE: "cpu"} if offloads and match[1] == "3" else {}),
    }


def deepspeed_fields(reader: OptionReader) -> tuple[int, Mapping[str, Any]]:
    """Return the stage of a DeepSpeed configuration, and the layout's field of what it offloads."""
    stage = reader.get(STAGE, 0)
    if stage not in (0, 1, 2, 3):
        raise InputError(f"{STAGE}: found {str(stage)[:40]!r}; a stage from 0 to 3 is required")
    on_host = reader.get(OPTIMIZER_DEVICE, "none") == "cpu"
    return stage, {"layout.offload": "optimizer"} if on_host else {}


def optimizer_field(name: Any, label: str, more_names: Mapping[str, str], reader: OptionReader) -> Mapping[str, Any]:
    """Return the optimizer by transformers' name or one of `more_names`. Raises `InputError` for an unknown one."""
    names = {alias: optimizer for optimizer, aliases in OPTIMIZERS.items() for alias in aliases} | dict(more_names)
    text = str(name)
    if text not in names:
        raise InputError(f"{label}: {describe_unknown(text, names)}")
    if "4bit" in text:
        reader.notes.append(f"{label}: moments of {text} in 4 bits are priced in 8")
    return {"job.optimizer": names[text]}


def number_formats(half: str | None, sharding: Sharding, *, pure: bool) -> str:
    """Return the recipe of a model that is trained whole in 16 bits (`half`), or in fp32 without.

    Without master weights (`pure`) PyTorch's optimizers keep moments in the format of the weights. DeepSpeed's and FSDP's mixed
    precision keep fp32 weights beside the 16-bit ones that products read; DDP reduces the gradients of fp32 weights.
    """
    if half is None:
        return "fp32"
    if half == "fp16":
        return "fp16"
    if pure and sharding.software == "ddp":
        return "bf16_bf16_state"
    return "bf16_fp32_reduction" if sharding.software == "ddp" else "bf16"


def is_on(reader: OptionReader, name: str, default: Any = False) -> bool:
    """Return whether an option is true; `auto` is."""
    value = reader.get(name, default)
    return is_true(value) or str(value).lower() == "auto"


def any_on(reader: OptionReader, *names: str) -> bool:
    """Return whether one of some options is true; all of them count as read."""
    return True in [is_true(reader.get(name, False)) for name in names]


def read_only(to_fields: Callable[[OptionReader], Mapping[str, Any]]) -> OptionMapping:
    """Return a mapping of a framework that is read and not written."""
    return OptionMapping(lambda launch: {}, to_fields)


def refuse_writing(options: Options, launch: Launch) -> LaunchFiles:
    """Raise `InputError`: launches of trainers are read, and not written."""
    raise InputError(
        "export: launches of this framework are read, and not written; accelerate or deepspeed is required"
    )


def trainer_target(**fields: Any) -> Target:
    """Return a target that is read and not written."""
    return Target(
        requirements=(),
        write=refuse_writing,
        command=lambda launch: "",
        includes_model=False,
        is_written=False,
        **fields,
    )


def yaml_trainer_target(model_key: str, **fields: Any) -> Target:
    """Return a target whose YAML names the model under a key, and runs on DeepSpeed where it has a configuration of it."""

    def model_name(options: Options) -> str | None:
        name = options.get(model_key)
        return name if isinstance(name, str) else None

    def find_model(options: Options) -> Architecture | None:
        name = model_name(options)
        return hub_model(name) if name else None

    def choose_stack(options: Options) -> str:
        return "deepspeed" if any(name.startswith(DEEPSPEED) for name in options) else "accelerate"

    return trainer_target(
        stack="accelerate", model_name=model_name, find_model=find_model, choose_stack=choose_stack, **fields
    )
