"""Models of the catalogue as MaxText makes them of exported configurations.

    PYTHONPATH=src python benchmarks/export_check/maxtext_models.py --maxtext CHECKOUT [MODEL...]

Each configuration goes through MaxText's parser, and its model is made abstractly (nnx.eval_shape): shapes of tensors, rotary
angles, the scale of scores, norms and the router are those of the catalogue's model, or the export lists the difference. Dims of
heads and groups, which MaxText splits otherwise, count as one. Prints a line for each; status 1 where one differs or MaxText
refuses it. Needs JAX, flax, optax, orbax-checkpoint, aqtp, qwix, grain, jaxtyping and what maxtext.py needs; what else MaxText
imports is stubbed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import stubs
from maxtext import STUBBED, command_words
from model_verdicts import NOT_EXPORTED, ModelVerdict, chosen_models, describe_problems, model_arguments, print_verdicts

from shardwise.interop.frameworks.targets import get_target
from shardwise.interop.launches.launch import Launch, Machines
from shardwise.interop.launches.translate_launch import choose_precision, lost_fields, refusals, to_options
from shardwise.layout import Layout
from shardwise.model import Architecture, Job, Rotary, load_model, num_params
from shardwise.step import balance_biases
from shardwise.step.rank_program import single_device_instance

TARGET = get_target("maxtext")
INSTALLED = ("flax", "orbax", "aqt", "qwix", "optax", "absl", "etils", "google", "grain", "transformers", "safetensors",
             "huggingface_hub", "psutil")  # fmt: skip
MORE_STUBBED = (
    "drjax",
    "jsonlines",
    "seqio",
    "ml_collections",
    "tensorflow_datasets",
    "tensorflow_text",
    "PIL",
    "sympy",
)
NEW_SYNTAX = ("maxtext.kernels.mhc", "maxtext.kernels.mhc.api")  # of Python 3.12; no model here has hyper-connections
# Weights here that are one tensor there, with the dims that lie one behind the other.
JOINED = (("w_q_plain", "w_q_rotary", "IR"), ("w_kv_down", "w_k_rotary", "CR"), ("w_k_up", "w_v_up", "IU"))
HEAD_DIMS = ("K", "G")  # one dim there
TOLERANCE = 1e-5  # angles are computed in float32


def abstract_model(config: Any) -> Any:
    """Return the model of a configuration, without values."""
    from maxtext.utils import maxtext_utils, model_creation_utils

    with contextlib.redirect_stdout(io.StringIO()):
        return model_creation_utils.create_nnx_abstract_model(config, maxtext_utils.get_mesh_from_config(config))[1]


def parse_config(files: Mapping[str, str]) -> Any:
    """Return MaxText's configuration of a launch's files."""
    from maxtext.configs import pyconfig

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        more = ["enable_checkpointing=false", "skip_jax_distributed_system=true"]
        words = ["train", *command_words(Path(folder)), *more]
        return pyconfig._initialize_pydantic(words, log_config=False, jax_cache_dir="")


def our_shapes(model: Architecture) -> Counter[tuple[int, ...]]:
    """Return how many tensors of each shape a model has, with sizes in ascending order; joined as MaxText joins them.

    Its modules of multi-token prediction read the final norm of the model, as the export says.
    """
    shapes: Counter[tuple[int, ...]] = Counter()
    for path, parameters in single_device_instance(model).parameters_by_unit.items():
        dims_by_weight = {
            name.removeprefix("block."): parameter.use.dims
            for name, parameter in parameters.items()
            if parameter.path == path and not (path.startswith("predict") and name == "final_norm.weight")
        }
        for first, second, joined in JOINED:
            if first in dims_by_weight and second in dims_by_weight:
                other_dims = tuple(dim for dim in dims_by_weight.pop(first) if dim not in joined)
                del dims_by_weight[second]
                shapes[_sorted_shape(model, other_dims, sum(model.dims[dim] for dim in joined))] += 1
        shapes.update(_sorted_shape(model, dims) for dims in dims_by_weight.values())
    if model.numerics.gating.scores == "sigmoid":
        shapes[(model.num_experts,)] += len(balance_biases(model))
    return shapes


def _sorted_shape(model: Architecture, dims: Iterable[str], more: int = 1) -> tuple[int, ...]:
    """Return the sizes of dims in ascending order, heads as one, without those of 1."""
    heads = math.prod(model.dims[dim] for dim in dims if dim in HEAD_DIMS)
    return sort_sizes((*(model.dims[dim] for dim in dims if dim not in HEAD_DIMS), heads, more))


def sort_sizes(shape: Iterable[int]) -> tuple[int, ...]:
    """Return the sizes above 1 in ascending order."""
    return tuple(sorted(size for size in shape if size != 1))


def their_shapes(config: Any, built: Any) -> Counter[tuple[int, ...]]:
    """Return how many tensors of each shape MaxText has; layers that it stacks count one by one."""
    import jax
    from flax import nnx

    shapes: Counter[tuple[int, ...]] = Counter()
    for path, value in jax.tree_util.tree_flatten_with_path(nnx.state(built, nnx.Param))[0]:
        name, shape, copies = jax.tree_util.keystr(path), list(value.shape), 1
        is_stacked = config.scan_layers and "layers" in name and "mtp" not in name and "remainder" not in name
        if is_stacked:
            copies = shape.pop(min(config.param_scan_axis, len(shape) - 1))
        shapes[sort_sizes(shape)] += copies
    return shapes


def shape_problems(model: Architecture, config: Any, built: Any) -> Iterator[str]:
    """Yield shapes of which there are more here or there."""
    ours, theirs = our_shapes(model), their_shapes(config, built)
    for shape in sorted(ours.keys() | theirs.keys()):
        if ours[shape] != theirs[shape]:
            yield f"tensors of {shape}: {ours[shape]} here, {theirs[shape]} there"


def attention_layers(built: Any) -> list[Any]:
    """Return the attention modules of a model."""
    from flax import nnx

    return [module for _, module in nnx.iter_modules(built) if hasattr(module, "rotary_embedding")]


def constant_problems(model: Architecture, config: Any, built: Any, lost: set[str]) -> Iterator[str]:
    """Yield how norms, router, angles and the scale of scores differ; fields that the export names as lost may."""
    numerics, gating = model.numerics, model.numerics.gating
    expected: dict[str, Any] = {
        "normalization_layer_epsilon": numerics.norm_epsilon, "attn_logits_soft_cap": numerics.attention_cap,
        "final_logits_soft_cap": numerics.logit_cap, "num_experts": model.num_experts or 1,
    }  # fmt: skip
    if model.num_experts:
        expected |= {"num_experts_per_tok": model.experts_per_token, "routed_scaling_factor": gating.scale}
        if gating.scores != "softmax":
            expected["routed_score_func"] = gating.scores
    if gating.groups > 1 and "numerics.gating.groups" not in lost:
        expected |= {"n_routing_groups": gating.groups, "topk_routing_group": gating.chosen_groups}
        if not config.model_name.startswith("deepseek3"):
            yield "groups of experts without a name for which they count"
    for name, value in expected.items():
        theirs = getattr(config, name)
        if (theirs or None) != value:
            yield f"{name} is {theirs!r} for {value!r}"
    layers = attention_layers(built)
    if not layers:
        return
    if model.structure.has_rotary:
        for is_local, layer in {has_window(layer): layer for layer in layers}.items():
            rotary = model.numerics.local_rotary if is_local else None
            yield from rotary_problems(model, rotary or model.numerics.rotary, layer.rotary_embedding, lost)
    yield from score_problems(model, layers, lost)


def has_window(layer: Any) -> bool:
    """Return whether an attention module has a sliding window."""
    return layer.attention_type.value == "local_sliding"


def rotary_problems(model: Architecture, rotary: Rotary, embedding: Any, lost: set[str]) -> Iterator[str]:
    """Yield other angles, and another magnitude."""
    import numpy as np
    import torch

    from shardwise.run.kernels.positions_and_masks import frequencies

    width = model.rope_head_dim or model.head_dim
    if hasattr(embedding, "freqs_cis"):
        theirs = np.angle(np.asarray(embedding.freqs_cis[1]))
        magnitude = 0.1 * math.log(embedding.rope_factor) + 1.0 if embedding.attention_scaling else 1.0
    else:
        theirs, magnitude = 1.0 / np.asarray(embedding.timescale).ravel(), 1.0  # with the factor of linear scaling
    ours = frequencies(width, rotary, torch.float64, torch.device("cpu")).numpy()
    theirs = theirs[:: theirs.size // ours.size]  # LLaMARotaryEmbedding repeats each for both dims of a pair
    is_declared = lost & {f"numerics.rotary.{name}" for name in ("factor", "base", "low", "high", "original_positions")}
    if theirs.shape != ours.shape or not (is_declared or np.allclose(theirs, ours, rtol=TOLERANCE, atol=0)):
        yield f"other rotary angles, by up to {np.abs(theirs / ours - 1).max():.1e}"
    if not (is_declared or math.isclose(magnitude, rotary.amplitude, rel_tol=1e-6)):
        yield f"rotary magnitude {magnitude} for {rotary.amplitude}"


def score_problems(model: Architecture, layers: list[Any], lost: set[str]) -> Iterator[str]:
    """Yield another scale of scores, where the layers hold it, and another size of windows."""
    scale = model.numerics.attention_scale or model.head_dim**-0.5
    theirs = layers[0].softmax_scale if model.kv_lora_rank else layers[0].query_pre_attn_scalar
    if theirs is not None and "numerics.attention_scale" not in lost and not math.isclose(theirs, scale, rel_tol=1e-6):
        yield f"scores are multiplied by {theirs} for {scale}"
    windows = {layer.sliding_window_size for layer in layers if has_window(layer)}
    if windows - {model.sliding_window}:
        yield f"windows of {windows} for {model.sliding_window}"


def verdict(name: str) -> ModelVerdict:
    """Return the verdict on a model of the catalogue; one that the export refuses is none of MaxText's."""
    model = load_model(name)
    seq_len = model.max_positions or 1024
    job = Job(global_batch_tokens=8 * seq_len, seq_len=seq_len, precision="bf16")
    machines = Machines(num_devices=1, devices_per_node=1, chip="tpu-v5p")
    launch = choose_precision(Launch(model=model, job=job, layout=Layout(recompute="full"), machines=machines), TARGET)
    reasons = refusals(launch, TARGET)
    if reasons:
        return ModelVerdict(NOT_EXPORTED, f"not exported: {reasons[0]}")
    options = to_options(TARGET, launch)
    lost = {field for field, _ in lost_fields(TARGET, launch, options)}
    config = parse_config(TARGET.write(options, launch))
    built = abstract_model(config)
    problems = [*shape_problems(model, config, built), *constant_problems(model, config, built, lost)]
    return describe_problems(problems, f"{num_params(model):,} parameters, shapes and constants as here")


def main() -> int:
    parser = model_arguments(__doc__)
    parser.add_argument("--maxtext", required=True, metavar="CHECKOUT")
    options = parser.parse_args()
    sys.modules.pop("maxtext")  # the judge of launches
    sys.path[0] = str(
        Path(options.maxtext, "src")
    )  # in the place of this folder, whose files have the frameworks' names
    stubs.stub(dict.fromkeys((name for name in (*STUBBED, *MORE_STUBBED) if name not in INSTALLED), "1.0"))
    for name in NEW_SYNTAX:
        sys.modules[name] = stubs.stub_module(name)
    logging.disable(logging.CRITICAL)
    from maxtext.configs import pyconfig

    pyconfig.max_utils.maybe_initialize_jax_distributed_system = lambda keys: None
    return print_verdicts((chosen_models(options), verdict))


if __name__ == "__main__":
    sys.exit(main())
