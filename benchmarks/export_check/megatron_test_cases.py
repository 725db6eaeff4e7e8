"""Launches that Megatron-LM publishes, as `shardwise read` understands them, judged by Megatron-LM's own parser and checks.

    python benchmarks/export_check/megatron_test_cases.py --megatron CHECKOUT

Reads every test case of the checkout (`tests/*/test_cases/*/*/model_config.yaml`) and compares the model, the job and the layout
with the arguments that Megatron-LM makes of the same file, read by PyYAML. A test case does not say its number of GPUs: the first
of `DEVICE_COUNTS` on which Shardwise reads it is taken for both. Prints the counts and each field that differs; status 1 if one
does. Needs PyTorch, packaging, PyYAML and Shardwise; other packages are stubbed as in `megatron.py`.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from megatron import stub_device

from shardwise.interop import read_files
from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.read_launch import ParsedLaunch, parse_launch
from shardwise.values import ShardwiseError

DEVICE_COUNTS = (8, 1, 2, 4, 16, 32, 64, 128, 256, 512, 1024, 2048)
POSITIONS = {"rope": "rotary", "yarn": "rotary", "mrope": "rotary", "learned_absolute": "learned", "none": "none"}


def main() -> int:
    """Compare every test case of a checkout and return the exit status."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--megatron", required=True, metavar="CHECKOUT")
    checkout = Path(options.parse_args().megatron)
    sys.path[0] = str(checkout)  # in the place of this folder, whose files have the frameworks' names
    sys.modules.pop("megatron")
    stub_device()
    counts: Counter[str] = Counter()
    differing: Counter[str] = Counter()
    for path in sorted(checkout.glob("tests/*/test_cases/*/*/model_config.yaml")):
        counts["test cases"] += 1
        parsed = parse_test_case(path)
        if parsed is None:
            continue
        counts["read"] += 1
        arguments = parse_with_megatron(path, parsed.launch.machines.num_devices)
        if arguments is None:
            continue
        counts["accepted by Megatron-LM's parser"] += 1
        expected = megatron_fields(arguments)
        counts["fields of each"] = len(expected)
        for name, value in shardwise_fields(parsed.launch).items():
            if value != expected[name]:
                differing[name] += 1
                print(f"{path.parent.name}: {name} is {expected[name]!r} in Megatron-LM, was read as {value!r}")
    print(", ".join(f"{count} {name}" for name, count in counts.items()), f"; differing: {dict(differing)}", sep="")
    return int(bool(differing) or not counts["fields of each"])


def parse_test_case(path: Path) -> ParsedLaunch | None:
    """Return a test case as Shardwise reads it; None if it refuses it."""
    files = read_files([str(path)])
    for num_devices in DEVICE_COUNTS:
        machines = Machines(num_devices=num_devices, devices_per_node=min(num_devices, 8), chip="h100")
        with contextlib.suppress(ShardwiseError):
            parsed = parse_launch(files, machines, user_fields={}, model=None)
            return parsed if parsed.target.name == "megatron" else None
    return None


def parse_with_megatron(path: Path, num_devices: int) -> argparse.Namespace | None:
    """Return the arguments that Megatron-LM's parser and checks make of a test case; None if they refuse it."""
    from megatron.training.arguments import add_megatron_arguments, validate_args

    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            # A test case may have options of its script, which this parser does not know.
            arguments, _ = parser.parse_known_args(
                command_words(yaml.safe_load(path.read_text(encoding="utf-8"))["MODEL_ARGS"])
            )
            arguments.rank, arguments.world_size = 0, num_devices
            validate_args(arguments)
    except (Exception, SystemExit):
        return None
    return arguments


def command_words(model_arguments: Mapping[str, Any]) -> list[str]:
    """Return the command line of the arguments of a test case: `true` is a flag alone, `false` leaves it out."""
    words: list[str] = []
    for flag, value in model_arguments.items():
        if value is None or value is False:
            continue
        values = value if isinstance(value, list) else [value]
        words += [flag, *(str(item) for item in values if item is not True)]
    return words


def shardwise_fields(launch: Launch) -> dict[str, Any]:
    """Return the fields of a launch that are compared, in the terms of `megatron_fields`."""
    model, job, layout = launch.model, launch.job, launch.layout
    has_dense_layers = not model.num_experts or bool(model.num_dense_layers)
    return {
        "layers": model.num_layers, "hidden": model.d_model, "heads": model.num_heads, "positions": model.positions,
        "kv heads": None if model.kv_lora_rank else model.num_kv_heads,
        "head dim": None if model.kv_lora_rank else model.head_dim,
        "dense ffn": (model.dense_d_ff or model.d_ff) if has_dense_layers else None,
        "expert ffn": model.d_ff if model.num_experts else None,
        "experts": model.num_experts, "top k": model.experts_per_token if model.num_experts else 0,
        "shared experts": model.shared_expert_width, "tied": model.tied_embeddings, "qk norm": model.qk_norm,
        "norm": model.norm, "bias": bool(model.bias) and set(model.bias) != {"qkv"}, "mtp": model.num_predict_layers,
        "sequence": job.seq_len, "batch": job.num_seqs, "micro-batch": layout.micro_batch_seqs,
        "tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": layout.ep,
        "expert tp": layout.expert_tp if model.num_experts else 1, "virtual stages": layout.num_virtual_stages,
        "sequence parallel": layout.sequence_parallel, "sharded optimizer": layout.zero_stage > 0,
        "full recompute": layout.recompute == "full",
    }  # fmt: skip


def megatron_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the same fields as Megatron-LM's arguments have them after its checks."""
    experts = arguments.num_experts or 0
    frequency = arguments.moe_layer_freq  # 1, every Nth layer, or 0 and 1 for each layer
    has_dense_layers = not experts or (0 in frequency if isinstance(frequency, list) else frequency != 1)
    query_groups = arguments.num_query_groups if arguments.group_query_attention else None
    is_latent = arguments.multi_latent_attention
    return {
        "layers": arguments.num_layers, "hidden": arguments.hidden_size, "heads": arguments.num_attention_heads,
        "positions": POSITIONS[arguments.position_embedding_type],
        "kv heads": None if is_latent else query_groups or arguments.num_attention_heads,
        "head dim": None if is_latent else arguments.kv_channels,
        "dense ffn": arguments.ffn_hidden_size if has_dense_layers else None,
        "expert ffn": (arguments.moe_ffn_hidden_size or arguments.ffn_hidden_size) if experts else None,
        "experts": experts, "top k": arguments.moe_router_topk if experts else 0,
        "shared experts": arguments.moe_shared_expert_intermediate_size or 0,
        "tied": not arguments.untie_embeddings_and_output_weights,
        "qk norm": bool(arguments.qk_layernorm) and not is_latent,
        "norm": "rms" if arguments.normalization == "RMSNorm" else "layer", "bias": bool(arguments.add_bias_linear),
        "mtp": arguments.mtp_num_layers or 0,
        "sequence": arguments.seq_length, "batch": arguments.global_batch_size, "micro-batch": arguments.micro_batch_size,
        "tp": arguments.tensor_model_parallel_size, "pp": arguments.pipeline_model_parallel_size,
        "cp": arguments.context_parallel_size, "ep": arguments.expert_model_parallel_size,
        "expert tp": arguments.expert_tensor_parallel_size if experts else 1,
        "virtual stages": arguments.virtual_pipeline_model_parallel_size or 1,
        "sequence parallel": bool(arguments.sequence_parallel),
        "sharded optimizer": arguments.use_distributed_optimizer
        or arguments.use_layer_wise_distributed_optimizer  # of dist_muon: whole matrices are dealt out to the ranks
        or arguments.use_torch_fsdp2,
        "full recompute": arguments.recompute_granularity == "full",
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
