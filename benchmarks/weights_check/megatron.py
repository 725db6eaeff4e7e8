"""Whether Megatron-LM loads checkpoints that were written for it, and computes the same with them; and what it saves of them.

    python benchmarks/weights_check/megatron.py --megatron CHECKOUT FOLDER

FOLDER is what `write.py megatron` or `megatron-ranks` wrote. Run it in an environment with PyTorch and what Megatron-Core
imports. Its own GPTModel is built of its own modules on the CPU, with gloo, on as many processes as `degrees.json` asks for;
its own `load_checkpoint` reads the folder, and its own code saves it under `saved/`. What asks for a GPU is told that it is
the CPU. Prints the largest difference, and a line for each model that is refused.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import os
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

EXTRA = "_extra_state"
LIMIT = 1e-10  # of the largest logit: all is in float64


class OnCpu(TorchFunctionMode):
    """The CPU wherever its code asks for a GPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class InFloat64(TorchFunctionMode):
    """Float64 wherever its arithmetic asks for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


class Attention(torch.nn.Module):
    """Causal attention [s, b, n, h] for latent attention, for which it has none of its own on a CPU."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **more: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, q: Any, k: Any, v: Any, mask: Any, **more: Any) -> torch.Tensor:
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)


def config_of(model: dict[str, Any], degrees: dict[str, int]) -> Any:
    """Its own config of a model with these sizes."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    gated, latent, gating = model["mlp"] == "swiglu", model["kv_lora_rank"] > 0, model["numerics"]["gating"]
    sizes: dict[str, Any] = {
        "num_layers": model["num_layers"], "hidden_size": model["d_model"], "num_attention_heads": model["num_heads"],
        "ffn_hidden_size": model["dense_d_ff"] or model["d_ff"], "add_bias_linear": "attention_out" in model["bias"],
        "add_qkv_bias": model["bias"] == ["qkv"], "gated_linear_unit": gated, "activation_func": F.silu if gated else tanh_gelu,
        "normalization": "LayerNorm" if model["norm"] == "layer" else "RMSNorm", "qk_layernorm": model["qk_norm"] or latent,
        "layernorm_epsilon": model["numerics"]["norm_epsilon"], "params_dtype": torch.float64, "pipeline_dtype": torch.float64,
        "softmax_type": "learnable" if model["sinks"] else "vanilla",
    }  # fmt: skip
    if latent:
        sizes |= {
            "multi_latent_attention": True, "q_lora_rank": model["q_lora_rank"] or None, "kv_lora_rank": model["kv_lora_rank"],
            "qk_head_dim": model["head_dim"] - model["rope_head_dim"], "qk_pos_emb_head_dim": model["rope_head_dim"],
            "v_head_dim": model["v_head_dim"], "rope_type": "rope", "rotary_base": model["numerics"]["rotary"]["base"],
        }  # fmt: skip
    else:
        sizes |= {"num_query_groups": model["num_kv_heads"], "kv_channels": model["head_dim"]}
    if model["num_experts"]:
        dense, layers, grouped = model["num_dense_layers"], model["num_layers"], gating["groups"] > 1
        sizes |= {
            "num_moe_experts": model["num_experts"], "moe_router_topk": model["experts_per_token"],
            "moe_ffn_hidden_size": model["d_ff"], "moe_router_topk_scaling_factor": gating["scale"],
            "moe_shared_expert_intermediate_size": model["shared_expert_width"] or None, "moe_grouped_gemm": False,
            "moe_shared_expert_gate": model["shared_gate"], "moe_token_dispatcher_type": "allgather",
            "moe_router_score_function": gating["scores"], "moe_router_enable_expert_bias": gating["scores"] == "sigmoid",
            "moe_router_pre_softmax": not model["numerics"]["normalised_gates"],
            "moe_router_num_groups": gating["groups"] if grouped else None,
            "moe_router_group_topk": gating["chosen_groups"] if grouped else None,
            "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1, "moe_router_dtype": "fp64",
        }  # fmt: skip
    return (MLATransformerConfig if latent else TransformerConfig)(
        **sizes, use_cpu_initialization=True, bias_activation_fusion=False, bias_dropout_fusion=False, apply_rope_fusion=False,
        masked_softmax_fusion=False, hidden_dropout=0.0, attention_dropout=0.0, attention_softmax_in_fp32=False,
        tensor_model_parallel_size=degrees["tp"], pipeline_model_parallel_size=degrees["pp"],
        expert_model_parallel_size=degrees["ep"],
    )  # fmt: skip


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def built(model: dict[str, Any], degrees: dict[str, int]) -> Any:
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config, rotary = config_of(model, degrees), model["numerics"]["rotary"]
    if model["num_dense_layers"]:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
        layers = spec.layer_specs
    else:
        spec = get_gpt_layer_local_spec(
            num_experts=model["num_experts"] or None, qk_layernorm=config.qk_layernorm, normalization=config.normalization,
            multi_latent_attention=model["kv_lora_rank"] > 0,
        )  # fmt: skip
        layers = [spec]
    for layer in layers if model["kv_lora_rank"] else ():
        layer.submodules.self_attention.submodules.core_attention = Attention
    llama3 = rotary["original_positions"] > 0
    rows = degrees["divisible"] * degrees["tp"]
    gpt = GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=-(-model["vocab_size"] // rows) * rows, parallel_output=False,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
        max_sequence_length=model["max_positions"] or 64, share_embeddings_and_output_weights=model["tied_embeddings"],
        position_embedding_type={"rotary": "rope", "learned": "learned_absolute", "none": "none"}[model["positions"]],
        rotary_base=rotary["base"], rotary_percent=rotary["part"], rope_scaling=llama3, rope_scaling_factor=rotary["factor"],
        seq_len_interpolation_factor=rotary["factor"] if rotary["factor"] != 1 and not llama3 else None,
    )  # fmt: skip
    return gpt.double().eval()


def arguments(folder: Path, degrees: dict[str, int]) -> Any:
    """The arguments that its loading and saving ask for, of its own parser."""
    from megatron.training.arguments import add_megatron_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    form = "torch_dist" if list(folder.glob("release/.metadata")) else "torch"
    words = ["--load", str(folder), "--num-layers", "2", "--ckpt-format", form, "--no-load-optim", "--no-load-rng",
             "--no-save-optim", "--no-save-rng"]  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        parsed = parser.parse_args(words)
    parsed.rank, parsed.world_size = dist.get_rank(), dist.get_world_size()
    parsed.tensor_model_parallel_size, parsed.pipeline_model_parallel_size = degrees["tp"], degrees["pp"]
    return parsed


def loaded(model: Any, args: Any) -> None:
    """Its own way from a folder to a model. Raises `ValueError` for names that are not those of the model."""
    from megatron.training import checkpointing, global_vars

    global_vars._GLOBAL_ARGS = None
    global_vars.set_args(args)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        checkpointing.load_checkpoint([model], None, None, strict=True)
    if "load_return" in printed.getvalue():
        raise ValueError(printed.getvalue().partition("load_return")[2][:300])


def saved(model: Any, folder: Path, args: Any) -> None:
    """Its own way from a model to a folder."""
    from megatron.core import dist_checkpointing
    from megatron.training import checkpointing

    content = checkpointing.generate_state_dict(args, [model], None, None, None, iteration=1)
    if args.ckpt_format == "torch":
        path = Path(checkpointing.get_checkpoint_name(str(folder), 1))
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, path)
    else:
        path = folder / "iter_0000001"
        path.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        dist_checkpointing.save(content, str(path))
    (folder / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")


def logits(model: Any, ids: torch.Tensor, rows: int) -> torch.Tensor | None:
    """Of the last stage; the stages before it hand their hidden states on."""
    from megatron.core import parallel_state

    sequences, positions = ids.shape
    mask = torch.triu(torch.ones(1, 1, positions, positions, dtype=torch.bool), 1)
    if not parallel_state.is_pipeline_first_stage():
        hidden = torch.empty(positions, sequences, model.config.hidden_size, dtype=torch.float64)
        dist.recv(hidden, parallel_state.get_pipeline_model_parallel_prev_rank())
        model.set_input_tensor(hidden)
    with torch.no_grad(), InFloat64():
        computed = model(ids, torch.arange(positions).expand(sequences, -1), mask)
    if parallel_state.is_pipeline_last_stage():
        return computed[..., :rows]
    dist.send(computed.contiguous(), parallel_state.get_pipeline_model_parallel_next_rank())
    return None


def judge(folder: Path) -> float:
    """How far its logits are from those expected, of the largest. Raises what Megatron raises."""
    described, degrees = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("model", "degrees")
    )
    expected = torch.load(folder / "expected.pt")
    with InFloat64():
        model = built(described, degrees)
    for tensor in model.parameters():
        tensor.data.fill_(float("nan"))
    args = arguments(folder / "weights", degrees)
    loaded(model, args)
    computed = logits(model, expected["ids"], described["vocab_size"])
    saved(model, folder / "saved", args)
    if computed is None:
        return 0.0
    return float((computed - expected["logits"]).abs().max() / expected["logits"].abs().max())


def verdict(folder: Path) -> str:
    """What is wrong, or a number."""
    try:
        difference = judge(folder)
    except (Exception, SystemExit) as error:
        if "TRACE" in os.environ:
            raise
        return f"{type(error).__name__}: {str(error)[:300]}"
    return f"{difference:.1e}" if difference <= LIMIT else f"logits differ by {difference:.1e}"


def on_cpu() -> None:
    """What asks for a GPU gets the CPU."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    torch.cuda.empty_cache = torch.cuda.synchronize = lambda *operands: None
    torch.Tensor.cuda = lambda self, *operands, **options: self  # type: ignore[method-assign]
    CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()


def facts(folder: Path) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a model, as a distributed checkpoint and as a rank's file have them."""
    described, degrees = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8")) for name in ("model", "degrees")
    )
    model = built(described, degrees)
    shapes: dict[str, list[int]] = {}
    for name, sharded in model.sharded_state_dict().items():
        parts = sharded.build() if hasattr(sharded, "build") else [sharded]
        shapes |= {f"megatron {part.key}": list(part.global_shape) for part in parts if EXTRA not in name}
    rank_shapes = {
        name: list(tensor.shape) for name, tensor in model.state_dict().items() if isinstance(tensor, torch.Tensor)
    }
    return shapes | {f"megatron-ranks {name}": shape for name, shape in rank_shapes.items()}


def worker(
    rank: int, megatron: str, degrees: tuple[int, int, int], folders: list[Path], results: Any, wants_facts: bool
) -> None:
    """One rank of a mesh, for all models that are loaded on it."""
    warnings.simplefilter("ignore")
    sys.path[0] = megatron  # in the place of this folder, whose files have the frameworks' names
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    tp, pp, ep = degrees
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(tp * pp * ep), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo")
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=ep)
    on_cpu()
    with OnCpu():
        for folder in folders:
            results.put((folder.name, json.dumps(facts(folder)) if wants_facts else verdict(folder)))
    dist.barrier()
    dist.destroy_process_group()


def judged(megatron: str, folders: list[Path], wants_facts: bool) -> Iterator[tuple[str, str]]:
    """The verdicts of all ranks, by the names of the folders; models of one mesh after the other in the same processes."""
    meshes: dict[tuple[int, int, int], list[Path]] = {}
    for folder in folders:
        degrees = json.loads((folder / "degrees.json").read_text(encoding="utf-8"))
        meshes.setdefault((degrees["tp"], degrees["pp"], degrees["ep"]), []).append(folder)
    context = multiprocessing.get_context("spawn")
    for number, (mesh, mesh_folders) in enumerate(meshes.items()):
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(29631 + number)}
        results = context.Queue()
        ranks = math.prod(mesh)
        processes = [
            context.Process(target=worker, args=(rank, megatron, mesh, mesh_folders, results, wants_facts))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for _ in range(ranks * len(mesh_folders)):
            yield results.get(timeout=600)
        for process in processes:
            process.join()


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--megatron", required=True, metavar="CHECKOUT")
    options.add_argument("--facts", action="store_true", help="print names and shapes of the models' tensors instead")
    options.add_argument("folder", type=Path, metavar="FOLDER")
    chosen = options.parse_args()
    folders = sorted(path.parent for path in chosen.folder.glob("*/model.json"))
    if chosen.facts:
        print(json.dumps({name: json.loads(text) for name, text in judged(chosen.megatron, folders, True)}))
        return 0
    worst: dict[str, float] = {}
    problems: dict[str, str] = {}
    for name, text in judged(chosen.megatron, folders, False):
        try:
            worst[name] = max(worst.get(name, 0.0), float(text))
        except ValueError:
            problems.setdefault(name, text)
    print("\n".join(f"{name}: {text}" for name, text in problems.items()))
    taken = len(folders) - len(problems)
    largest = max(worst.values(), default=float("nan"))
    print(f"Megatron-LM loads {taken} of {len(folders)}; logits differ by {largest:.1e} at most")
    return int(bool(problems) or not folders)


if __name__ == "__main__":
    sys.exit(main())
