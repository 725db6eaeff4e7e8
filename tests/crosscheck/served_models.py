"""Small models of `transformers` in double precision, what they generate, and the same models on virtual devices."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from shardwise.derive.inference_unit import InferenceScheme
from shardwise.interop.weights.huggingface_folder import load_hf
from shardwise.model import Architecture
from shardwise.model.numerics import NORM_EPSILON
from shardwise.run.engine.model_builder import single_device_instance
from shardwise.run.numpy.inference import NewTokens, ServedModel, lay_out_tokens
from shardwise.sharding import Mesh

Weights = Mapping[str, Mapping[str, Any]]
PROMPTS = ((3, 17, 5, 9, 30, 1, 8), (11, 2, 6), (25, 4, 4, 19, 7), (14, 28, 10, 22))
NUM_NEW, NUM_SLOTS = 5, 16
SHARED: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "rms_norm_eps": NORM_EPSILON, "eos_token_id": None,
    "pad_token_id": 0, "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
}  # fmt: skip
CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {
        "intermediate_size": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4,
    }),
    "qwen3_moe": ("Qwen3MoeConfig", {
        "intermediate_size": 24, "moe_intermediate_size": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 4,
        "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }),
    "deepseek_v3": ("DeepseekV3Config", {
        "intermediate_size": 24, "moe_intermediate_size": 8, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 12,
        "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5, "n_group": 2, "topk_group": 1,
        "routed_scaling_factor": 1.5, "norm_topk_prob": True, "scoring_func": "sigmoid",
        "rms_norm_eps": 1e-6,
    }),
    "mistral": ("MistralConfig", {
        "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "sliding_window": 4,
    }),
    "gpt_oss": ("GptOssConfig", {
        "intermediate_size": 8, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 4,
        "num_experts_per_tok": 2, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
    }),
}  # fmt: skip


class DoublePrecision(TorchFunctionMode):
    """Float64 wherever code asks for float32: models of `transformers` do so in norms, softmaxes and angles."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        return func(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()})


@dataclass(frozen=True)
class Generated:
    """A model's weights by unit, and the tokens and logits that it generates for each prompt, greedily."""

    architecture: Architecture
    weights: Weights
    tokens: tuple[tuple[int, ...], ...]
    logits: tuple[Any, ...]  # [NUM_NEW, V] each


@lru_cache
def generated(name: str) -> Generated:
    """Return what `transformers` generates with a model of a family, and its weights, read from its files."""
    import transformers

    transformers.logging.set_verbosity_error()
    config_class, fields = CONFIGS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SHARED, **fields})
    config._attn_implementation = config._experts_implementation = "eager"
    with warnings.catch_warnings(), torch.no_grad(), DoublePrecision():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
        for parameter in model.parameters():
            parameter.normal_(0.5 if parameter.dim() == 1 else 0.0, 0.3)
        for module in model.modules():  # those of DeepSeek-V3's latents have another in its code
            if hasattr(module, "variance_epsilon"):
                module.variance_epsilon = NORM_EPSILON
        tokens, logits = zip(*(_generate(model, prompt) for prompt in PROMPTS), strict=True)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            stored = load_hf(folder, torch.float64)
    by_unit = single_device_instance(stored.architecture).parameters_by_unit
    weights = {
        unit: {weight: stored.tensors[parameter.name].numpy() for weight, parameter in parameters.items()}
        for unit, parameters in by_unit.items()
    }
    return Generated(stored.architecture, weights, tokens, logits)


def _generate(model: Any, prompt: Sequence[int]) -> tuple[tuple[int, ...], Any]:
    output = model.generate(
        torch.tensor([prompt]), max_new_tokens=NUM_NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
    )  # fmt: skip
    return tuple(output.sequences[0, len(prompt) :].tolist()), torch.cat(output.logits).numpy()


AXES = ("cp", "dp_e", "dp_m", "kv_e", "kv_m", "rep_e", "rep_m", "ws")


def serve(name: str, degrees: Mapping[str, int], *, num_rows: int, num_stages: int = 1, **choices: Any) -> ServedModel:
    """Return a model on the devices of a mesh with these degrees, with its cache empty."""
    model = generated(name)
    scheme = InferenceScheme(structure=model.architecture.structure, **choices)
    mesh = Mesh.of({axis: degrees.get(axis, 1) for axis in AXES})
    return ServedModel(
        architecture=model.architecture, scheme=scheme, mesh=mesh, weights=model.weights, num_rows=num_rows,
        num_slots=NUM_SLOTS * len(PROMPTS) // num_rows, num_stages=num_stages,
    )  # fmt: skip


def place_sequences(num_rows: int) -> dict[int, tuple[int, int]]:
    """Return the row and the first slot of each prompt's sequence: rows are pools that several sequences share."""
    per_row = len(PROMPTS) // num_rows
    return {index: (index // per_row, index % per_row * NUM_SLOTS) for index in range(len(PROMPTS))}


def logits_by_sequence(
    served: ServedModel, tokens: NewTokens, order: Sequence[int], *, absorbs: bool
) -> dict[int, Any]:
    """Run a pass, and return the logits of the picked tokens by sequence; `order` has the sequences of the chunks."""
    logits = served.run(tokens, absorbs_latent=absorbs)
    places = place_sequences(served.num_rows)
    num_seen: dict[int, int] = {}
    logits_of = {}
    for sequence in order:
        row, _ = places[sequence]
        logits_of[sequence] = logits[row, num_seen.get(row, 0)]
        num_seen[row] = num_seen.get(row, 0) + 1
    return logits_of


def decode(
    served: ServedModel, logits: Mapping[int, Any], num_steps: int, positions: Mapping[int, int]
) -> dict[int, Any]:
    """Decode greedily from the logits of each prompt, and return the logits [1 + num_steps, V] of each sequence."""
    all_logits = {sequence: [row] for sequence, row in logits.items()}
    places = place_sequences(served.num_rows)
    for step in range(num_steps):
        chunks = [
            (sequence, [int(np.argmax(rows[-1]))], positions[sequence] + step) for sequence, rows in all_logits.items()
        ]
        tokens = lay_out_tokens(chunks, served.num_rows, places)
        for sequence, row in logits_by_sequence(served, tokens, list(all_logits), absorbs=True).items():
            all_logits[sequence].append(row)
    return {sequence: np.stack(rows) for sequence, rows in all_logits.items()}


def prefill(served: ServedModel, chunks: Sequence[tuple[int, int, int]], *, absorbs: bool = False) -> dict[int, Any]:
    """Compute parts (sequence, first token, end) of prompts in one pass, and return the logits of the last token of each."""
    parts = [(sequence, PROMPTS[sequence][first:end], first) for sequence, first, end in chunks]
    tokens = lay_out_tokens(parts, served.num_rows, place_sequences(served.num_rows))
    return logits_by_sequence(served, tokens, [sequence for sequence, _, _ in chunks], absorbs=absorbs)


def whole_prompts() -> list[tuple[int, int, int]]:
    return [(index, 0, len(prompt)) for index, prompt in enumerate(PROMPTS)]
