"""MaxText's models by name, and sizes that are all multiplied.

Source: MaxText at e591f30 (2026-08-22), src/maxtext/configs/models, configs/types.py.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from functools import cache
from importlib import resources

from shardwise.errors import InputError
from shardwise.export.field import Options
from shardwise.export.maxtext_model import BASE, UNPRICED
from shardwise.export.target import option_table
from shardwise.names import did_you_mean


@cache
def known_models() -> Mapping[str, Options]:
    """The options of each of MaxText's models by its name, from the package's table."""
    text = resources.files("shardwise.export").joinpath("options", "maxtext_models.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(line for line in text.splitlines() if not line.startswith("#"))
    return {row["name"]: json.loads(row["options"]) for row in rows}


def named_model(options: Options) -> Options:
    """Options of a model with the name of MaxText's in their place, where one has the same; else as they are."""
    own = {name: options.get(name, default) for name, default in BASE.items()}
    sayable = option_table("maxtext")["model_name"].choices
    for name, theirs in known_models().items():
        same = {**BASE, **{key: value for key, value in theirs.items() if key in BASE}} == own and not _unpriced(theirs)
        if same and name in sayable:
            return {"model_name": name, **{key: value for key, value in options.items() if key not in BASE}}
    return options


def with_model(options: Options) -> Options:
    """Options with those of the model that they name, which take their place, and with a scale of all sizes worked in.

    Raises `InputError` for a name that the release does not have.
    """
    name = str(options.get("model_name", "default")).replace("-Instruct", "")
    if name != "default":
        if name not in known_models():
            near = did_you_mean(name, known_models())
            raise InputError(f"model_name: found {name!r}{near}; a model of configs/models is required")
        theirs = known_models()[name]
        given = options if options.get("override_model_config") else {}
        options = {**options, **{key: value for key, value in theirs.items() if key not in given}}
    return _scaled(options, options.get("global_parameter_scale", 1))


def _scaled(options: Options, scale: object) -> Options:
    """Sizes times powers of two. Source: types.py, get_individual_scales: heads and MLP first, then width, then layers."""
    if scale == 1:
        return options
    if not isinstance(scale, int) or scale < 1 or scale & (scale - 1) or scale > 2**30:
        raise InputError(f"global_parameter_scale: found {scale!r}; a power of two is required")
    layers, rest = divmod(scale.bit_length() - 1, 3)
    wide, model = layers + (rest > 0), layers + (rest > 1)
    by = {"base_num_query_heads": wide, "base_num_kv_heads": wide, "base_mlp_dim": wide, "base_moe_mlp_dim": wide,
          "base_emb_dim": model, "base_num_decoder_layers": layers}  # fmt: skip
    sizes = {name: options.get(name, BASE[name]) for name in by}
    return {**options, **{name: size * 2 ** by[name] if size > 0 else size for name, size in sizes.items()}}


def _unpriced(options: Options) -> list[str]:
    return [name for name, value in UNPRICED.items() if options.get(name, value) != value]
