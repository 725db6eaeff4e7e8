"""Weights of recurrent mixers from those of modules of `transformers`, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardwise.model.recurrent_mixers import RecurrentMixer

Arrays = dict[str, Any]


def split_array(array: Any, sizes: Mapping[str, int], axis: int = 0) -> Arrays:
    """Return named parts of an array along an axis."""
    ends = np.cumsum(list(sizes.values()))
    assert ends[-1] == array.shape[axis]
    return dict(zip(sizes, np.split(array, ends[:-1], axis=axis), strict=True))


def stack_filters(stored: Any, sizes: Mapping[str, int], shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    """Return the filters [W, *channels] of streams that a module convolves together."""
    parts = split_array(stored[:, 0], sizes)
    return {f"{name}_conv": part.T.reshape(-1, *shapes[name]) for name, part in parts.items()}


def mamba2_weights(mixer: RecurrentMixer, stored: Mapping[str, Any]) -> Arrays:
    groups, per, n, x = (mixer.dims[d] for d in "LONX")
    width = len(stored["out_proj.weight"])
    heads, keys = ((groups, per), (groups, n)) if mixer.structure.has_groups else ((groups,), (n,))
    shapes: dict[str, tuple[int, ...]] = {"z": (*heads, x), "x": (*heads, x), "b": keys, "c": keys, "dt": heads}
    sizes = {name: int(np.prod(shape)) for name, shape in shapes.items()}
    streams = {name: sizes[name] for name in "xbc"}
    arrays = stack_filters(stored["conv1d.weight"], streams, shapes)
    biases = split_array(stored["conv1d.bias"], streams)
    arrays |= {f"{name}_conv.bias": part.reshape(shapes[name]) for name, part in biases.items()}
    projections = split_array(stored["in_proj.weight"], sizes)
    arrays |= {f"w_{name}": part.reshape(*shapes[name], width) for name, part in projections.items()}
    if "in_proj.bias" in stored:
        projections = split_array(stored["in_proj.bias"], sizes)
        arrays |= {f"{name}.bias": part.reshape(shapes[name]) for name, part in projections.items()}
        arrays["out.bias"] = stored["out_proj.bias"]
    if "norm.weight" in stored:
        arrays["norm.weight"] = stored["norm.weight"].reshape(*heads, x)
    vectors = {"step.bias": "dt_bias", "log_rate": "A_log", "skip": "D"}
    arrays |= {name: stored[vector].reshape(heads) for name, vector in vectors.items()}
    return arrays | {"w_out": stored["out_proj.weight"].T.reshape(*heads, x, width)}


def mamba1_weights(mixer: RecurrentMixer, stored: Mapping[str, Any]) -> Arrays:
    channels, n, rank = (mixer.dims[d] for d in "LNq")
    arrays = {
        f"w_{name}": part
        for name, part in split_array(stored["in_proj.weight"], {"x": channels, "z": channels}).items()
    }
    narrow = split_array(stored["x_proj.weight"], {"step_latent": rank, "b": n, "c": n})
    arrays |= {f"w_{name}": part for name, part in narrow.items()}
    arrays |= {
        f"{name}_norm.weight": stored[f"{norm}_layernorm.weight"]
        for name, norm in zip(narrow, ("dt", "b", "c"), strict=True)
    }
    return arrays | {
        "x_conv": stored["conv1d.weight"][:, 0].T, "x_conv.bias": stored["conv1d.bias"], "w_step": stored["dt_proj.weight"],
        "step.bias": stored["dt_proj.bias"], "log_rate": stored["A_log"], "skip": stored["D"],
        "w_out": stored["out_proj.weight"].T,
    }  # fmt: skip


def grouped_mamba1_weights(mixer: RecurrentMixer, stored: Mapping[str, Any]) -> Arrays:
    """Return the weights of a mixer with several groups of channels; rows for channels and for their gates alternate (Zamba)."""
    groups, per, n, rank = (mixer.dims[d] for d in "LONq")
    width = len(stored["out_proj.weight"])
    rows = stored["in_proj.weight"].reshape(groups, per, 2, width)
    narrow = split_array(stored["x_proj_weight"], {"step_latent": rank, "b": n, "c": n}, axis=1)
    return {
        "w_x": rows[:, :, 0], "w_z": rows[:, :, 1], **{f"w_{name}": part for name, part in narrow.items()},
        "x_conv": stored["conv1d.weight"][:, 0].T.reshape(-1, groups, per),
        "x_conv.bias": stored["conv1d.bias"].reshape(groups, per),
        "w_step": stored["dt_proj_weight"], "step.bias": stored["dt_proj_bias"], "log_rate": stored["A_log"], "skip": stored["D"],
        "w_out": stored["out_proj.weight"].T.reshape(groups, per, width),
    }  # fmt: skip
