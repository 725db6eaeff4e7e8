"""Models of the catalogue as Megatron-LM builds them of exported arguments, beside the catalogue's number of parameters.

    PYTHONPATH=src python benchmarks/export_check/megatron_models.py --megatron CHECKOUT [MODEL...]

Each model's arguments go through Megatron-LM's parser and checks, and its GPTModel is built on the meta device, with the layers
that need no Transformer Engine. Prints a line for each model; status 1 where a number differs or Megatron-LM refuses the
arguments. Needs PyTorch and packaging; one GPU is pretended.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import io
import os
import shlex
import sys
import traceback
import typing
from typing import Any

from stubs import stub

from shardwise.interop.frameworks.megatron.launch_script import TARGET
from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.launches.translate_launch import refusals, to_options
from shardwise.interop.text_formats.command_flags import format_flags
from shardwise.layout import Layout
from shardwise.model import Job, load_model, model_names, num_params

VERSIONS = {"triton": "3.5.0", "einops": "0.8.1"}
# What a plan does not say, and what needs no kernels of Transformer Engine or Apex.
REST = (
    "--lr 1e-4 --train-iters 10 --tokenizer-type NullTokenizer --mock-data --use-cpu-initialization --no-rope-fusion "
    "--disable-jit-fuser --no-persist-layer-norm --no-gradient-accumulation-fusion"
)


def pretend_gpu(checkout: str) -> None:
    """Have Megatron-LM import, and place its parameters on the meta device."""
    import torch

    sys.path[0] = checkout  # in the place of this folder, whose files have the frameworks' names
    stub(VERSIONS)
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: type("H100", (), {"major": 9, "minor": 0})()  # type: ignore
    torch.cuda.current_device = lambda: torch.device("meta")  # type: ignore[assignment, return-value]
    torch.cuda.Stream = type("Stream", (), {"__init__": lambda self, *arguments, **named: None})  # type: ignore
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT="29533", RANK="0", WORLD_SIZE="1", CUDA_DEVICE_MAX_CONNECTIONS="1"
    )
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    from megatron.core import parallel_state
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    parallel_state.initialize_model_parallel(create_gloo_process_groups=False)
    build, known = DotProductAttention.__init__, set(inspect.signature(DotProductAttention.__init__).parameters)

    def build_without_latent_widths(self: Any, *arguments: Any, **named: Any) -> None:
        build(self, *arguments, **{name: value for name, value in named.items() if name in known})

    DotProductAttention.__init__ = build_without_latent_widths


def arguments_of(launch: Launch) -> list[str]:
    """Return the words of a launch's arguments."""
    return shlex.split(" ".join(" ".join(flag) for flag in format_flags(to_options(TARGET, launch))) + " " + REST)


def built_model(words: list[str]) -> Any:
    """Return Megatron-LM's model of some arguments, on the meta device."""
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
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
        if config.num_moe_experts:
            layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
        else:
            layers = get_gpt_layer_local_spec(
                None, False, config.qk_layernorm, config.multi_latent_attention, normalization=args.normalization
            )
        return GPTModel(
            config=config, transformer_layer_spec=layers, vocab_size=args.vocab_size,
            max_sequence_length=args.max_position_embeddings, position_embedding_type=args.position_embedding_type,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights, rotary_base=args.rotary_base,
            rotary_percent=args.rotary_percent, rope_scaling=args.use_rope_scaling, rope_scaling_factor=args.rope_scaling_factor,
        )  # fmt: skip


def verdict(name: str) -> tuple[bool, str]:
    """Return whether a model is Megatron-LM's too, and what to say of it; one that is refused by the export is."""
    model = load_model(name)
    job = Job(global_batch_tokens=8 * 1024, seq_len=1024, precision="bf16_fp32_main_gradients")
    launch = Launch(model=model, job=job, layout=Layout(), machines=Machines(num_devices=1, devices_per_node=1))
    reasons = refusals(launch, TARGET)
    if reasons:
        return True, f"not exported: {reasons[0]}"
    if model.kv_lora_rank and not model.q_lora_rank:  # the norm of its keys and values alone
        return True, "not built: its layers need Transformer Engine"
    try:
        parameters = sum(parameter.numel() for parameter in built_model(arguments_of(launch)).parameters())
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return False, f"refused: {error} ({where.filename.rpartition('/')[2]}:{where.lineno})"
    difference = parameters - num_params(model)
    return difference == 0, f"{parameters:,} parameters, {'as here' if not difference else f'{difference:+,} to here'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", required=True, metavar="CHECKOUT")
    parser.add_argument("models", nargs="*", metavar="MODEL")
    options = parser.parse_args()
    pretend_gpu(options.megatron)
    is_equal = True
    for name in options.models or model_names():
        equal, text = verdict(name)
        is_equal &= equal
        print(f"{name:24}{text}", flush=True)
    return int(not is_equal)


if __name__ == "__main__":
    sys.exit(main())
