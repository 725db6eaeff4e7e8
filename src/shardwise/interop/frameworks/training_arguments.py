"""Arguments of training scripts in files, and the launcher's options that they stand for without a configuration of Accelerate.

Scripts on transformers' Trainer take their arguments from the command line or from a YAML or JSON file (TRL's `--config`, the
recipes of alignment-handbook and open-r1), started by `accelerate launch`, torchrun or TRL itself. Sources: transformers 5.23.0,
training_args.py (`fsdp`, `deepspeed`, `bf16`), trainer.py and hf_argparser.py; Accelerate 1.15.0, utils/dataclasses.py; TRL at
24.7.2026 (1.10.0.dev0): trainer/base_config.py and sft_config.py (defaults), accelerate_configs, scripts/utils.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from shardwise.interop.frameworks.trainers.trainer_fields import (
    OPTIMIZER_DEVICE,
    STAGE,
    WEIGHT_DEVICE,
    read_deepspeed,
    require_supervised,
)
from shardwise.interop.frameworks.training_script_models import MODEL_OPTIONS
from shardwise.interop.launches.launch_scripts import LENGTH_OPTIONS, SCRIPT_PREFIX, is_true
from shardwise.interop.launches.target import LaunchFiles
from shardwise.interop.text_formats.config_trees import flatten, parse_json, parse_yaml
from shardwise.interop.text_formats.option_tables import Options
from shardwise.values import InputError, lookup

# Keys of a file of arguments beside its model's: one of them makes it one of a training.
TRAINING_KEYS = (
    "per_device_train_batch_size", "learning_rate", "num_train_epochs", "max_steps", "gradient_accumulation_steps", "output_dir",
)  # fmt: skip
TRAINER_DEFAULTS: Options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}  # of TrainingArguments
# Keys of a file of LLaMA-Factory, which has a reader of its own.
OTHER_KEYS = ("stage", "finetuning_type")
# Arguments of TRL's other trainers (DPO, KTO, GRPO, RLOO, rewards), none of which SFTConfig has.
OBJECTIVES: Mapping[str, tuple[str, ...]] = dict.fromkeys(
    ("beta", "num_generations", "max_prompt_length", "max_completion_length", "reward_funcs", "reward_weights",
     "desirable_weight", "precompute_ref_log_probs", "center_rewards_coefficient", "use_vllm"), (),
)  # fmt: skip
# Arguments that TRL's SFT script has and transformers' own scripts lack, and what SFTConfig sets where they say nothing.
TRL_ARGUMENTS = ("packing", "dataset_mixture", "use_peft", "assistant_only_loss")
TRL_DEFAULTS: Options = {"max_length": 1024, "gradient_checkpointing": True}
# What starts one of TRL's trainers: `trl sft`, or a script that is named for it.
_TRAINERS = "sft|dpo|grpo|rloo|kto|reward|ppo|orpo|cpo|gkd|xpo|nash_md|online_dpo|prm"
_PROGRAM = re.compile(rf"(?:^|\s)trl\s+({_TRAINERS})\b|\b(?:run_)?({_TRAINERS})\.py\b", re.MULTILINE)
# Words of `--accelerate_config` of TRL that name a configuration within its package. Source: trl/accelerate_configs.
ACCELERATE_CONFIGS: Mapping[str, Options] = {
    "single_gpu": {"distributed_type": "NO"},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    "fsdp1": {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 1, "fsdp_config.fsdp_sharding_strategy": "FULL_SHARD"},
    "fsdp2": {"distributed_type": "FSDP", "fsdp_config.fsdp_version": 2, "fsdp_config.fsdp_reshard_after_forward": True},
    **{f"zero{stage}": {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": stage} for stage in (1, 2, 3)},
}  # fmt: skip
# Words of transformers' `--fsdp` with the strategy of FSDP1 that they stand for.
FSDP_WORDS = {"full_shard": "FULL_SHARD", "shard_grad_op": "SHARD_GRAD_OP", "hybrid_shard": "HYBRID_SHARD",
              "hybrid_shard_zero2": "HYBRID_SHARD_ZERO2", "no_shard": "NO_SHARD"}  # fmt: skip


def split_files(files: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, Any], dict[str, str]]:
    """Return the arguments that configuration files have, the tree of Accelerate's file, and the files that are neither.

    Raises `InputError` for two files of a kind, and for the arguments of preference tuning or reinforcement learning.
    """
    kinds: dict[str, list[tuple[str, dict[str, Any]]]] = {"arguments": [], "launcher": []}
    remaining: dict[str, str] = {}
    for name, text in files.items():
        tree = parse_json(text, name) if name.lower().endswith(".json") else parse_yaml(text, name)
        is_launcher = not name.lower().endswith(".json") and not has_arguments(tree)
        if has_arguments(tree) or is_launcher:
            kinds["arguments" if has_arguments(tree) else "launcher"].append((name, tree))
        else:
            remaining[name] = text
    for kind, entries in kinds.items():
        if len(entries) > 1:
            listed = ", ".join(name for name, _ in entries)
            required = "arguments of the training script" if kind == "arguments" else "YAML of Accelerate"
            raise InputError(f"Accelerate: found {listed}; one file with the {required} is required")
    arguments, launcher = (dict(entries[0][1]) if entries else {} for entries in kinds.values())
    return arguments, launcher, remaining


def has_arguments(tree: Mapping[str, Any]) -> bool:
    """Return whether a file has the arguments of a script on transformers' Trainer: its model, and its batch or steps."""
    has_model = any(isinstance(tree.get(name), str) for name in MODEL_OPTIONS)
    return has_model and any(name in tree for name in TRAINING_KEYS) and not any(name in tree for name in OTHER_KEYS)


def has_argument_file(files: LaunchFiles) -> bool:
    """Return whether one of the YAML files has the arguments of a training script, by its top-level keys."""
    texts = {name: text for name, text in files.items() if name.endswith((".yaml", ".yml"))}
    keys = [set(re.findall(r"^([a-z_]+):", text, re.MULTILINE)) for text in texts.values()]
    return any(
        "model_name_or_path" in names and names & {*TRAINING_KEYS} and not names & {*OTHER_KEYS} for names in keys
    )


def with_defaults(arguments: Mapping[str, Any], scripts: Iterable[str]) -> dict[str, Any]:
    """Return a supervised script's arguments, with what TRL's SFTConfig sets if the script is TRL's.

    `scripts` are the shell scripts that start it. Raises `InputError` for preference tuning and reinforcement learning.
    """
    programs = {match[1] or match[2] for text in scripts for match in _PROGRAM.finditer(text)}
    other_program = {"program": min(programs - {"sft"})} if programs - {"sft"} else {}
    require_supervised({**arguments, **other_program}, {**OBJECTIVES, "program": ()})
    is_trl = "sft" in programs or any(name in arguments for name in TRL_ARGUMENTS)
    if not is_trl:
        return dict(arguments)
    defaults = {name: value for name, value in TRL_DEFAULTS.items() if name not in arguments}
    if any(name in arguments for name in LENGTH_OPTIONS):
        defaults.pop("max_length", None)
    half = {} if is_true(arguments.get("fp16", False)) or "bf16" in arguments else {"bf16": True}
    return {**defaults, **half, **arguments}


def launcher_options(arguments: Mapping[str, Any], files: LaunchFiles) -> dict[str, Any]:
    """Return the options of Accelerate that a script's arguments stand for: DeepSpeed's, FSDP's, or replicas of the model.

    Raises `InputError` for a DeepSpeed configuration that is neither given nor named after its stage.
    """
    named = arguments.get("accelerate_config")
    if isinstance(named, str):
        name = named.rpartition("/")[2].removesuffix(".yaml")
        return dict(lookup(ACCELERATE_CONFIGS, name, "accelerate_config"))
    if arguments.get("deepspeed"):
        return {"distributed_type": "DEEPSPEED", **deepspeed_options(arguments["deepspeed"], files)}
    strategy = arguments.get("fsdp")
    if not strategy or is_off(strategy):
        return {"distributed_type": "MULTI_GPU"}
    return {"distributed_type": "FSDP", **_fsdp_options(strategy, arguments.get("fsdp_config"), files)}


def deepspeed_options(reference: Any, files: LaunchFiles) -> dict[str, Any]:
    """Return the options of Accelerate's `deepspeed_config` that a DeepSpeed configuration stands for: given, or by its name."""
    configured = read_deepspeed(reference, files)
    devices = {name: configured[key] for name, key in (("offload_optimizer_device", OPTIMIZER_DEVICE),
                                                       ("offload_param_device", WEIGHT_DEVICE)) if key in configured}  # fmt: skip
    steps = configured.get("deepspeed_config.gradient_accumulation_steps")
    batches = {"gradient_accumulation_steps": steps} if isinstance(steps, int) else {}
    section = {"zero_stage": configured.get(STAGE, 0), **devices, **batches}
    return {f"deepspeed_config.{name}": value for name, value in section.items()}


def _fsdp_options(strategy: Any, config: Any, files: LaunchFiles) -> dict[str, Any]:
    """Return the options of FSDP by the value of `--fsdp` and its configuration: a mapping, or a file that is given."""
    listed = str(" ".join(strategy) if isinstance(strategy, list) else strategy).replace(",", " ").split()
    name_of_strategy = next((FSDP_WORDS[word] for word in listed if word in FSDP_WORDS), "FULL_SHARD")
    if isinstance(config, str):
        name = config.rpartition("/")[2]
        config = parse_json(files[name], name) if name in files else {}
    section = {f"fsdp_{key.removeprefix('fsdp_')}": value for key, value in flatten(config or {}).items()}
    section = {"fsdp_version": section.pop("fsdp_version", 1), **section}
    offload = {"fsdp_offload_params": True} if "offload" in listed else {}
    if str(section["fsdp_version"]) == "1":
        section.setdefault("fsdp_sharding_strategy", name_of_strategy)
    return {f"fsdp_config.{name}": value for name, value in {**section, **offload}.items()}


def is_off(value: Any) -> bool:
    """Return whether a value turns an option off: false, an empty list, or a word for it."""
    return value in (False, [], "") or str(value).lower() in ("false", "none", "null", "no", "0")


def referred_file(arguments: Mapping[str, Any]) -> str | None:
    """Return the file of arguments that a script's own arguments name (`--config recipe.yaml`), or None."""
    name = arguments.get("config")
    return name.rpartition("/")[2] if isinstance(name, str) and name.endswith((".yaml", ".yml", ".json")) else None


def with_prefix(arguments: Mapping[str, Any], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments as options of the training script; a section that is no option of its own is one value."""
    return {
        SCRIPT_PREFIX + name: value
        for name, value in arguments.items()
        if value is not None or SCRIPT_PREFIX + name in names
    }
