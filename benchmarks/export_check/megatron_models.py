"""Models of the catalogue as Megatron-LM builds them of exported arguments.

    PYTHONPATH=src python benchmarks/export_check/megatron_models.py --megatron CHECKOUT [MODEL...]

Each model's arguments go through Megatron-LM's parser and checks, and its GPTModel is built on the meta device, with the layers
that need no Transformer Engine: parameters, names and shapes of tensors, rotary angles, scales, norms and the router are those of
the catalogue's model. Prints a line for each; status 1 where one differs or Megatron-LM refuses the arguments. Needs PyTorch and
packaging; one GPU is pretended.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import shlex
import sys
import warnings
from typing import Any

from megatron_core_models import local_layers, model_problems, needs_transformer_engine, pretend_gpu
from model_verdicts import (
    NOT_BUILT,
    NOT_EXPORTED,
    ModelVerdict,
    chosen_models,
    describe_problems,
    model_arguments,
    print_verdicts,
)
from stubs import stub

from shardwise.interop.frameworks.megatron.launch_script import TARGET
from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.launches.translate_launch import lost_fields, refusals, to_options
from shardwise.interop.text_formats.command_flags import format_flags
from shardwise.layout import Layout
from shardwise.model import Job, load_model, num_params

VERSIONS = {"triton": "3.5.0", "einops": "0.8.1"}
# What a plan does not say, and what needs no kernels of Transformer Engine or Apex.
REST = (
    "--lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --mock-data --use-cpu-initialization --no-rope-fusion "
    "--disable-jit-fuser --no-persist-layer-norm --no-gradient-accumulation-fusion"
)


def arguments_of(launch: Launch) -> list[str]:
    """Return the words of a launch's arguments."""
    return shlex.split(" ".join(" ".join(flag) for flag in format_flags(to_options(TARGET, launch))) + " " + REST)


def built_model(words: list[str]) -> Any:
    """Return Megatron-LM's model of some arguments, on the meta device."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import add_megatron_arguments, validate_args

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        args = parser.parse_args(words)
        args.rank, args.world_size, args.transformer_impl = 0, 1, "local"
        validate_args(args)
        config = core_transformer_config_from_args(args)
    config.perform_initialization, config.bias_dropout_fusion = False, False
    with torch.device("meta"):
        layers = local_layers(config)
        prediction = (
            get_gpt_mtp_block_spec(config, layers, use_transformer_engine=False) if config.mtp_num_layers else None
        )
        return GPTModel(
            config=config, transformer_layer_spec=layers, mtp_block_spec=prediction, vocab_size=args.vocab_size,
            max_sequence_length=args.max_position_embeddings, position_embedding_type=args.position_embedding_type,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent, rope_scaling=args.use_rope_scaling, rope_scaling_factor=args.rope_scaling_factor,
        )  # fmt: skip


def verdict(name: str) -> ModelVerdict:
    """Return the verdict on a model of the catalogue; one that the export refuses is none of Megatron-LM's."""
    model = load_model(name)
    job = Job(global_batch_tokens=8 * 1024, seq_len=1024, precision="bf16_fp32_main_gradients")
    launch = Launch(model=model, job=job, layout=Layout(), machines=Machines(num_devices=1, devices_per_node=1))
    reasons = refusals(launch, TARGET)
    if reasons:
        return ModelVerdict(NOT_EXPORTED, f"not exported: {reasons[0]}")
    if needs_transformer_engine(model):
        return ModelVerdict(NOT_BUILT, "not built: its layers need Transformer Engine")
    lost = {field for field, _ in lost_fields(TARGET, launch, to_options(TARGET, launch))}
    problems = list(model_problems(model, built_model(arguments_of(launch)), lost))
    return describe_problems(problems, f"{num_params(model):,} parameters, tensors and constants as here")


def main() -> int:
    parser = model_arguments(__doc__)
    parser.add_argument("--megatron", required=True, metavar="CHECKOUT")
    options = parser.parse_args()
    sys.path[0] = options.megatron  # in the place of this folder, whose files have the frameworks' names
    warnings.simplefilter("ignore")
    stub(VERSIONS)
    pretend_gpu()
    return print_verdicts((chosen_models(options), verdict))


if __name__ == "__main__":
    sys.exit(main())
