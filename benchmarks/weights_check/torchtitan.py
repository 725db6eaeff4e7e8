"""Whether torchtitan loads checkpoints that were written for it, and computes the same with them; and what it saves of them.

    python benchmarks/weights_check/torchtitan.py [--facts] FOLDER

FOLDER is what `write.py torchtitan` wrote. Run it in an environment with the wheel of torchtitan 0.3.0 and what it imports.
Its own model is built of its own parts on the CPU, with its plain attention, and computes in float64; the folder is loaded as
its checkpoint manager does (CheckpointManager.dcp_load), and saved as it saves it under `saved/`. Prints the largest
difference, and a line for each model that is refused; with --facts names and shapes of its models' tensors instead.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.overrides import TorchFunctionMode

LIMIT = 1e-10  # of the largest logit: all is in float64


def config_of(model: dict[str, Any]) -> Any:
    """The config of its own model with these sizes."""
    from torchtitan.models.common import Embedding, Linear

    kind = "deepseek_v3" if model["kv_lora_rank"] else "qwen3" if model["qk_norm"] else "llama3"
    norm, config, layers, options = {"deepseek_v3": deepseek, "qwen3": qwen, "llama3": llama}[kind](model)
    dim, rows = model["d_model"], model["vocab_size"]
    return config(
        dim=dim, vocab_size=rows, norm=norm(dim), layers=layers, enable_weight_tying=model["tied_embeddings"],
        tok_embeddings=Embedding.Config(num_embeddings=rows, embedding_dim=dim),
        lm_head=Linear.Config(in_features=dim, out_features=rows), **options,
    )  # fmt: skip


def norm_of(model: dict[str, Any]) -> Any:
    from torchtitan.models.common.nn_modules import RMSNorm

    return lambda width: RMSNorm.Config(normalized_shape=width, eps=model["numerics"]["norm_epsilon"])


def angles(kind: Any, model: dict[str, Any], width: int) -> Any:
    rotary = model["numerics"]["rotary"]
    scaled = rotary["original_positions"] > 0
    more = {
        "scaling_factor": rotary["factor"], "low_freq_factor": rotary["low"], "high_freq_factor": rotary["high"],
        "original_max_position_embeddings": rotary["original_positions"],
    }  # fmt: skip
    return kind(
        dim=width,
        max_seq_len=64,
        theta=rotary["base"],
        scaling="llama" if scaled else "none",
        **(more if scaled else {}),
    )


def heads(model: dict[str, Any]) -> dict[str, Any]:
    return {
        "n_layers": model["num_layers"], "dim": model["d_model"], "n_heads": model["num_heads"],
        "n_kv_heads": model["num_kv_heads"],
    }  # fmt: skip


def llama(model: dict[str, Any]) -> Any:
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.config_utils import make_gqa_config

    rope = angles(ComplexRoPE.Config, model, model["head_dim"])
    layers = llama3._build_llama3_layers(**heads(model), hidden_dim=model["d_ff"], rope=rope, attn_backend="flex")
    for layer in layers:  # a head's width of its own, which its function has no argument for
        layer.attention = make_gqa_config(
            dim=model["d_model"], n_heads=model["num_heads"], n_kv_heads=model["num_kv_heads"], head_dim=model["head_dim"],
            fuse_qkv=True, wqkv_param_init={}, wo_param_init={}, inner_attention=layer.attention.inner_attention, rope=rope,
        )  # fmt: skip
    return norm_of(model), llama3.Llama3Model.Config, layers, {}


def qwen(model: dict[str, Any]) -> Any:
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE

    common = {
        **heads(model), "head_dim": model["head_dim"], "attn_backend": "flex",
        "rope": angles(CosSinRoPE.Config, model, model["head_dim"]),
    }  # fmt: skip
    if not model["num_experts"]:
        return (
            norm_of(model),
            qwen3.Qwen3Model.Config,
            qwen3._build_qwen3_layers(**common, hidden_dim=model["d_ff"]),
            {},
        )
    layers = qwen3._build_qwen3_moe_layers(
        **common, moe_hidden_dim=model["d_ff"], num_experts=model["num_experts"], top_k=model["experts_per_token"],
        moe_comm_backend="standard",
    )  # fmt: skip
    for layer in layers:
        layer.moe.router.route_norm = model["numerics"]["normalised_gates"]
    return norm_of(model), qwen3.Qwen3Model.Config, layers, {}


def deepseek(model: dict[str, Any]) -> Any:
    from torchtitan.models import deepseek_v3
    from torchtitan.models.common import ComplexRoPE

    gating, shared = model["numerics"]["gating"], model["shared_expert_width"]
    grouped = gating["groups"] > 1
    layers = deepseek_v3._build_dsv3_layers(
        n_layers=model["num_layers"], dim=model["d_model"], n_heads=model["num_heads"],
        n_dense_layers=model["num_dense_layers"] if model["num_experts"] else model["num_layers"],
        q_lora_rank=model["q_lora_rank"], kv_lora_rank=model["kv_lora_rank"], v_head_dim=model["v_head_dim"],
        qk_nope_head_dim=model["head_dim"] - model["rope_head_dim"], qk_rope_head_dim=model["rope_head_dim"], mscale=1.0,
        dense_hidden_dim=model["dense_d_ff"] or model["d_ff"], moe_hidden_dim=model["d_ff"],
        num_experts=model["num_experts"] or 1, num_shared_experts=shared // model["d_ff"] or 1,
        router_top_k=model["experts_per_token"], router_score_func=gating["scores"], router_route_scale=gating["scale"],
        router_route_norm=model["numerics"]["normalised_gates"],
        router_num_expert_groups=gating["groups"] if grouped else None,
        router_num_limited_groups=gating["chosen_groups"] if grouped else None,
        attn_backend="flex", moe_comm_backend="standard", non_blocking_capacity_factor=None,
        rope=angles(ComplexRoPE.Config, model, model["rope_head_dim"]),
    )  # fmt: skip
    for layer in layers:
        if layer.moe is not None and not shared:
            layer.moe.shared_experts = None
    modules = deepseek_v3._build_mtp_layers(
        layers[-1], dim=model["d_model"], num_mtp_layers=model["num_predict_layers"]
    )
    return norm_of(model), deepseek_v3.DeepSeekV3Model.Config, layers, {"mtp_layers": modules}


def plain(config: Any, epsilon: float) -> None:
    """Its plain attention in the place of those for GPUs, and one epsilon in all norms."""
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.nn_modules import RMSNorm

    for layer in (*config.layers, *getattr(config, "mtp_layers", ())):
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
        for part in (layer, layer.attention):
            for name in getattr(type(part), "__dataclass_fields__", {}):
                if isinstance(getattr(part, name), RMSNorm.Config):
                    getattr(part, name).eps = epsilon


class InFloat64(TorchFunctionMode):
    """Float64 wherever its code asks for float32 or bf16: in angles, and in experts and what they send."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func in (torch.Tensor.float, torch.Tensor.bfloat16) else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


def one_by_one() -> None:
    """Products of experts by a loop: on a CPU its kernel is one in bf16."""
    from torchtitan.models.common.moe import GroupedExperts

    def products(self: Any, *, A: torch.Tensor, B_t: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        ends = offs.tolist()
        return torch.cat([A[start:end] @ B_t[i] for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False))])

    GroupedExperts._grouped_mm = products


def built(folder: Path) -> Any:
    described = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    config = config_of(described)
    plain(config, described["numerics"]["norm_epsilon"])
    with InFloat64():
        return config.build().double().eval()


def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), InFloat64():
        computed = model(ids)
    return computed[0] if isinstance(computed, list) else computed


def states(model: Any) -> Any:
    """The model as its checkpoint manager knows it."""
    from torchtitan.components.checkpointer import base

    return base.ModelWrapper([model])


def judge(folder: Path) -> float:
    """How far its logits are from those expected, of the largest. Raises what torchtitan raises."""
    model, expected = built(folder), torch.load(folder / "expected.pt")
    wrapped = states(model)
    stored = wrapped.state_dict()
    for tensor in stored.values():
        tensor.fill_(float("nan"))
    dcp.load(stored, checkpoint_id=str(folder / "weights"))
    wrapped.load_state_dict(stored)
    computed = logits(model, expected["ids"])
    dcp.save(wrapped.state_dict(), checkpoint_id=str(folder / "saved"))
    return float((computed - expected["logits"]).abs().max() / expected["logits"].abs().max())


def refused(folders: list[Path], differences: list[float]) -> Iterator[str]:
    for folder in folders:
        try:
            differences.append(judge(folder))
        except Exception as error:
            yield f"{folder.name}: {type(error).__name__}: {str(error)[:300]}"
            continue
        if not differences[-1] <= LIMIT:
            yield f"{folder.name}: logits differ by {differences[-1]:.1e}"


def facts(folders: list[Path]) -> dict[str, dict[str, list[int]]]:
    """Names and shapes of the tensors of its models, by the folders that describe them."""
    return {
        folder.name: {name: list(tensor.shape) for name, tensor in states(built(folder)).state_dict().items()}
        for folder in folders
    }


def main() -> None:
    warnings.simplefilter("ignore")
    *words, folder = sys.argv[1:]
    folders = sorted(path.parent for path in Path(folder).glob("*/model.json"))
    sys.path[0] = folder  # in place of this file's own folder, where it has torchtitan's name
    one_by_one()
    if words:
        print(json.dumps(facts(folders)))
        return
    differences: list[float] = []
    problems = list(refused(folders, differences))
    worst = max(differences, default=float("nan"))
    print(
        "\n".join(
            [*problems, f"torchtitan loads {len(differences)} of {len(folders)}; logits differ by {worst:.1e} at most"]
        )
    )
    sys.exit(bool(problems) or not folders)


if __name__ == "__main__":
    main()
