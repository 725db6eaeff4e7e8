"""Launches of trainers, as `shardwise read` understands them, judged by the trainers' own schemas and parsers.

    python -m venv trainers-check
    trainers-check/bin/pip install torch transformers==5.23.0 accelerate datasets omegaconf pillow
    trainers-check/bin/pip install --no-deps axolotl llamafactory trl peft
    trainers-check/bin/python -P benchmarks/export_check/trainers.py --axolotl CHECKOUT --llama-factory CHECKOUT --verl CHECKOUT

Reads every example of the checkouts and compares the fields that a price depends on with what Axolotl's pydantic schema
(`AxolotlInputConfig`), LLaMA-Factory's dataclasses (transformers' `HfArgumentParser`) and verl's configuration (OmegaConf)
make of the same file, defaults included. Prints the counts and each field that differs; status 1 if one does. Examples that
Shardwise or the parser refuses are counted. Needs `shardwise` on the path; one device is assumed, so that batches compare.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from shardwise.interop import read_files
from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.read_launch import parse_launch
from shardwise.values import ShardwiseError

DEVICES = (1, 2, 4, 8, 16)
Fields = Mapping[str, Any]


def main() -> int:
    """Compare every example of the checkouts and return the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in JUDGES:
        options.add_argument(f"--{name}", metavar="CHECKOUT")
    arguments = vars(options.parse_args())
    totals: Counter[str] = Counter()
    for name, judge in JUDGES.items():
        checkout = arguments[name.replace("-", "_")]
        if checkout:
            totals += compare(name, Path(checkout), judge)
    print("all: " + ", ".join(f"{count} {text}" for text, count in totals.items()))
    return int(totals["differing"] > 0 or not totals["compared"])


def compare(name: str, checkout: Path, judge: Callable[[Path, Path], Fields]) -> Counter[str]:
    """Print and return the counts of a trainer's examples, and print each field that differs."""
    counts: Counter[str] = Counter()
    for path in examples(name, checkout):
        launch = read(path, name)
        counts["read" if launch else "refused by Shardwise"] += 1
        if launch is None:
            continue
        try:
            expected = judge(path, checkout)
        except Exception as error:  # the parser's own checks, of many kinds
            counts["refused by the parser"] += 1
            print(f"{name}: {path.name}: refused by the parser: {str(error)[:100]!r}")
            continue
        counts["compared"] += 1
        understood = fields_of(launch)
        for field, value in expected.items():
            counts["fields"] += 1
            if understood[field] != value:
                counts["differing"] += 1
                print(f"{name}: {path.name}: {field} is {value!r} in the trainer, was read as {understood[field]!r}")
    print(f"{name}: " + ", ".join(f"{count} {text}" for text, count in counts.items()))
    return counts


def examples(name: str, checkout: Path) -> Iterator[Path]:
    """Yield the examples of a trainer."""
    patterns = {
        "axolotl": r"^base_model:",
        "llama-factory": r"^stage: (sft|pt)",
        "verl": r"verl.trainer.fsdp_sft_trainer",
    }
    for path in sorted((checkout / "examples").rglob("*")):
        is_launch = path.suffix in (".yaml", ".yml", ".sh")
        if is_launch and re.search(patterns[name], path.read_text(encoding="utf-8"), re.MULTILINE):
            yield path


def read(path: Path, name: str) -> Launch | None:
    """Return an example as Shardwise reads it on the first number of devices that it takes; None if it refuses it."""
    for num_devices in DEVICES:
        machines = Machines(num_devices=num_devices, devices_per_node=min(num_devices, 8), chip="h100")
        try:
            parsed = parse_launch(read_files([str(path)]), machines)
        except ShardwiseError:
            continue
        return parsed.launch if parsed.target.name == name else None
    return None


def fields_of(launch: Launch) -> Fields:
    """Return the fields of a launch that are compared."""
    model, job, layout = launch.model, launch.job, launch.layout
    return {
        "sequence": job.seq_len, "micro-batch": layout.micro_batch_seqs, "accumulation": launch.num_micro_batches,
        "batch": job.num_seqs, "rank": model.lora_rank, "full recompute": layout.recompute == "full", "tp": layout.tp,
        "cp": layout.cp, "4 bits": job.precision.startswith("qlora_nf4"), "8 bits": job.precision == "qlora_int8",
        "double quantization": job.precision == "qlora_nf4", "optimizer": job.optimizer, "shards": layout.zero_stage > 0,
        "steps": launch.num_steps or 0,
    }  # fmt: skip


# Kinds of optimizers in transformers' names: the words of the name that decide the state.
def optimizer_kind(name: str) -> str:
    """Return the optimizer whose state a name of transformers stands for."""
    text = str(name).rpartition(".")[2].lower()
    eight_bits = "8bit" in text or "4bit" in text
    kinds = ("muon", "lion", "adafactor", "sgd")
    kind = next((kind for kind in kinds if kind in text), "adamw")
    return f"{kind}_8bit" if eight_bits and kind == "adamw" else kind


def axolotl_fields(path: Path, checkout: Path) -> Fields:
    """Return the fields that Axolotl's schema makes of a configuration."""
    from axolotl.utils.schemas.config import AxolotlInputConfig

    text = path.read_text(encoding="utf-8")
    config = AxolotlInputConfig(**{key: value for key, value in yaml.safe_load(text).items() if value is not None})
    steps = config.gradient_accumulation_steps or max((config.batch_size or 0) // (config.micro_batch_size or 1), 1)
    four, eight, kind = bool(config.load_in_4bit), bool(config.load_in_8bit), config.adapter
    double = (config.bnb_config_kwargs or {}).get("bnb_4bit_use_double_quant", True)
    checkpoints = str(config.gradient_checkpointing).lower() in ("true", "offload", "offload_disk")
    fsdp_checkpointing = config.fsdp_config.activation_checkpointing if config.fsdp_config else False
    fields = {
        "sequence": config.sequence_len, "micro-batch": config.micro_batch_size, "accumulation": steps,
        "rank": (config.lora_r or 8) if kind else 0, "full recompute": checkpoints or bool(fsdp_checkpointing),
        "tp": config.tensor_parallel_size or 1, "cp": config.context_parallel_size or 1,
        "optimizer": optimizer_kind(getattr(config.optimizer, "value", config.optimizer)), "steps": config.max_steps or 0,
    }  # fmt: skip
    if kind:
        fields |= {"4 bits": four, "8 bits": eight and not four, "double quantization": four and double}
    return fields


def llama_factory_fields(path: Path, checkout: Path) -> Fields:
    """Return the fields that LLaMA-Factory's dataclasses make of a file of arguments."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"
    from llamafactory.hparams import DataArguments, FinetuningArguments, ModelArguments
    from transformers import HfArgumentParser, Seq2SeqTrainingArguments

    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    unchecked = ("deepspeed", "fsdp", "fsdp_config", "bf16", "fp16", "tf32")  # need their packages, or a GPU
    plain = {key: value for key, value in tree.items() if key not in unchecked}
    parser = HfArgumentParser([ModelArguments, DataArguments, Seq2SeqTrainingArguments, FinetuningArguments])
    model, data, training, tuning, *_ = parser.parse_dict(plain, allow_extra_keys=True)
    bits = str(model.quantization_bit)
    return {
        "sequence": data.cutoff_len, "micro-batch": training.per_device_train_batch_size,
        "accumulation": training.gradient_accumulation_steps, "steps": max(training.max_steps, 0),
        "rank": tuning.lora_rank if tuning.finetuning_type == "lora" else 0,
        "full recompute": not model.disable_gradient_checkpointing, "4 bits": bits == "4", "8 bits": bits == "8",
        "double quantization": bits == "4" and model.double_quantization,
        "optimizer": "muon" if tuning.use_muon else optimizer_kind(training.optim),
    }  # fmt: skip


def verl_fields(path: Path, checkout: Path) -> Fields:
    """Return the fields that verl's configuration has with the overrides of a script."""
    from omegaconf import OmegaConf

    base = OmegaConf.load(checkout / "verl" / "trainer" / "config" / "sft_trainer.yaml")
    command = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", " ")
    words = command.partition("verl.trainer.fsdp_sft_trainer")[2].partition("\n")[0].split()
    overrides = [word.lstrip("+") for word in words if "=" in word and "$" not in word]
    config = OmegaConf.merge(base, OmegaConf.from_dotlist(overrides))
    micro_batch = config.data.micro_batch_size_per_gpu
    if config.data.micro_batch_size is not None and not any("micro_batch_size_per_gpu" in word for word in overrides):
        micro_batch = config.data.micro_batch_size
    return {
        "sequence": config.data.max_length, "batch": config.data.train_batch_size, "micro-batch": micro_batch,
        "rank": config.model.lora_rank, "full recompute": config.model.enable_gradient_checkpointing,
        "cp": config.ulysses_sequence_parallel_size, "steps": config.trainer.total_training_steps or 0,
    }  # fmt: skip


JUDGES: Mapping[str, Callable[[Path, Path], Fields]] = {
    "axolotl": axolotl_fields, "llama-factory": llama_factory_fields, "verl": verl_fields,
}  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
