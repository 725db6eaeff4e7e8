"""`shardwise convert`: the weights of a run, or of a framework, as another framework reads them."""

from __future__ import annotations

import argparse
import importlib.util
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.values import InputError, Parser

if TYPE_CHECKING:
    from shardwise.interop.weights.checkpoint_formats import ConvertOptions
    from shardwise.interop.weights.convert import ConvertedModel

DESCRIPTION = """Write a model's weights as another framework reads them, one tensor at a time: those of a run (its latest
checkpoint), of one of its checkpoints, or of a folder of Hugging Face, torchtitan or Megatron-LM. Formats are huggingface
(safetensors with a config.json), torchtitan (torch.distributed.checkpoint), megatron (torch_dist, for any degrees) and
megatron-ranks (a file of each rank). A model that a framework does not compute is refused. `train --from` begins with any
of these folders."""
EXAMPLES = (
    "shardwise convert runs/a --to huggingface --out hf",
    "shardwise convert runs/a/checkpoints/step-00000200 --to torchtitan --out titan --dtype bf16",
    "shardwise convert hf --to megatron-ranks --tp 8 --pp 4 --out megatron",
    "shardwise convert megatron --model llama-3-8b --seq-len 8192 --to huggingface --out hf",
)
DEGREES = {"tp": "tensor", "pp": "pipeline", "ep": "expert"}


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    weights, ranks, output = parser.groups("weights", "of megatron-ranks", "output")
    weights.add_argument("folder", metavar="DIR", help="a run, one of its checkpoints, or a folder of a framework")
    weights.add_argument(
        "--to", required=True, metavar="FORMAT", help="huggingface, torchtitan, megatron or megatron-ranks"
    )
    weights.add_argument(
        "--model", metavar="MODEL", completes="models",
        help="which model the folder has, where it does not say so: a plan, a name or a config.json",
    )  # fmt: skip
    weights.add_argument("--dtype", metavar="NAME", help="fp64, fp32, fp16 or bf16 (default: what the weights are in)")
    weights.add_argument(
        "--seq-len", metavar="N", help="of huggingface: the longest sequence that the model was trained for"
    )
    for name, kind in DEGREES.items():
        ranks.add_argument(f"--{name}", metavar="N", help=f"the degree of {kind} parallelism (default: 1)")
    ranks.add_argument("--transformer-impl", metavar="NAME", help="transformer_engine (the default) or local")
    ranks.add_argument(
        "--make-vocab-size-divisible-by", metavar="N", help="what the run pads a vocabulary to (default: 128)"
    )
    output.add_argument("--out", required=True, metavar="DIR", help="where to write; a model that is there is replaced")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str:
    """What was written, as text or as JSON."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("convert: PyTorch is not installed; pip install shardwise[train]")
    from shardwise.interop.weights.convert import convert

    found = convert(
        arguments.folder,
        arguments.to,
        arguments.out,
        model=arguments.model,
        dtype=arguments.dtype,
        choices=_choices(arguments),
    )
    return json.dumps(found.payload(), indent=2) if arguments.json else _text(found)


def _choices(arguments: argparse.Namespace) -> ConvertOptions:
    """Raises `InputError` for flags that the format does not ask for."""
    from shardwise.interop.weights.checkpoint_formats import ConvertOptions
    from shardwise.interop.weights.megatron_rank_files import RankDegrees
    from shardwise.values import parse_count

    given = {name: getattr(arguments, name) for name in (*DEGREES, "make_vocab_size_divisible_by", "transformer_impl")}
    given = {name: value for name, value in given.items() if value is not None}
    if given and arguments.to != "megatron-ranks":
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise InputError(
            f"{flags}: {arguments.to} is the same for any degrees; leave it out, or --to megatron-ranks is required"
        )
    implementation = given.pop("transformer_impl", "transformer_engine")
    numbers = {name: parse_count(text, label=f"--{name.replace('_', '-')}") for name, text in given.items()}
    divisible = numbers.pop("make_vocab_size_divisible_by", RankDegrees().divisible)
    seq_len = None if arguments.seq_len is None else parse_count(arguments.seq_len, label="--seq-len")
    return ConvertOptions(
        seq_len=seq_len, degrees=RankDegrees(**numbers, divisible=divisible), implementation=implementation
    )


def _text(found: ConvertedModel) -> str:
    from shardwise.model import num_params
    from shardwise.values import format_count

    model = f"{found.architecture.name} ({format_count(num_params(found.architecture))} parameters)"
    return f"{model} of {found.source}, in {found.dtype}: {found.format.title} in {found.folder}\nbegin with it: {found.begin}"
