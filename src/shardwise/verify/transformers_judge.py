"""Parameters of a model compared with those of the model that `transformers` builds of the same config, without memory for them.

Names differ between the two, and so do shapes where one matrix is kept as several or several as one. So each tensor of
`transformers` is accounted for by a weight of the same layer with as many elements, or by several that add up to it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise.model import Architecture, borrowed_weights, num_params, unit_program
from shardwise.model.huggingface.config import parse_config
from shardwise.values import FileMessages, InputError, read_json_object

INSTALL = "pip install transformers torch"
ENDS = "outside the layers"
_LAYER = re.compile(r"(?:^|\.)(?:layers?|h|blocks)\.(\d+)\.")
# Adapters of one of the layers that share a block, by its number among them: a list in the block of the first one (Zamba2).
_ADAPTER = re.compile(r"adapter_list\.(\d+)\.")
# Names of what a plan leaves out: towers of images and sound, and what projects their states.
_TOWERS = re.compile(r"vision|visual|image|audio|multi_modal|mm_projector")
_IMAGE_ATTENTION = ".cross_attn."  # of layers that attend to images alone, which are left out whole
# Keys of a file that say nothing of the architecture, and that `transformers` may act on.
_IGNORED_KEYS = ("model_type", "quantization_config", "auto_map")


@dataclass(frozen=True, slots=True)
class LayerParameters:
    """Parameters of one layer, or of all that is outside the layers: elements by name, and shapes for messages."""

    elements: Mapping[str, int]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformersComparison:
    """A model beside that of `transformers`; `first_difference` is empty where all parameters are accounted for."""

    version: str
    model_class: str
    num_params: int
    our_num_params: int
    first_difference: str


def compare_with_transformers(path: str | Path) -> TransformersComparison:
    """Compare a config.json's parameters with those of its model in `transformers`.

    Raises `InputError` where `transformers` is not installed, does not know the model or cannot build it, and for a config that
    is not planned for.
    """
    if find_spec("transformers") is None or find_spec("torch") is None:
        raise InputError(f"--against-transformers: found no transformers with torch; they are required: {INSTALL}")
    source = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    config = read_json_object(source, FileMessages("model: ", "a config.json is required"))
    architecture = parse_config(config, name=source.stem)
    version, model = _build_meta_model(config)
    theirs = _without_image_layers(
        {name: tuple(p.shape) for name, p in model.named_parameters() if not _TOWERS.search(name)}
    )
    return TransformersComparison(
        version=version, model_class=type(model).__name__, num_params=sum(map(_elements, theirs.values())),
        our_num_params=num_params(architecture),
        first_difference=next(_differences(_group_by_layer(theirs, architecture), _group_program_weights(architecture)), ""),
    )  # fmt: skip


def _build_meta_model(config: Mapping[str, Any]) -> tuple[str, Any]:
    """Return the version of `transformers` and the model of a config on the meta device. Raises `InputError`."""
    torch, transformers = import_module("torch"), import_module("transformers")  # planning does without either
    transformers.logging.set_verbosity_error()
    keys = {key: value for key, value in config.items() if key not in _IGNORED_KEYS}
    try:
        with warnings.catch_warnings(), torch.device("meta"):
            warnings.simplefilter("ignore")
            described = transformers.AutoConfig.for_model(str(config.get("model_type")), **keys)
            for auto_class in (transformers.AutoModelForCausalLM, transformers.AutoModelForImageTextToText):
                if type(described) in auto_class._model_mapping:
                    return transformers.__version__, auto_class.from_config(described)
    except Exception as error:  # whatever its code raises for a config that it cannot use
        raise InputError(
            f"--against-transformers: transformers {transformers.__version__} cannot build the model of this config: {error}"
        ) from None
    raise InputError(
        f"--against-transformers: transformers {transformers.__version__} has no model that generates text of model_type "
        f"{config.get('model_type')!r}; another config is required, or another version"
    )


def _elements(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _without_image_layers(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes without those of layers that attend to images alone; the other layers keep their names."""
    prefixes = tuple({name.partition(_IMAGE_ATTENTION)[0] + "." for name in shapes if _IMAGE_ATTENTION in name})
    return {name: shape for name, shape in shapes.items() if not (prefixes and name.startswith(prefixes))}


def _group_by_layer(shapes: Mapping[str, tuple[int, ...]], architecture: Architecture) -> dict[str, LayerParameters]:
    groups: dict[str, dict[str, tuple[int, ...]]] = {ENDS: {}}
    units = architecture.layer_units
    sharing = [f"layer {i}" for i, unit in enumerate(units) if architecture.unit_architecture(unit).shared_block]
    matches = {name: _LAYER.search(name) for name in shapes}
    numbers = sorted({int(match[1]) for match in matches.values() if match})
    layers = {number: f"layer {position}" for position, number in enumerate(numbers)}  # without those left out
    for name, shape in shapes.items():
        match, adapter = matches[name], _ADAPTER.search(name)
        layer = layers[int(match[1])] if match else ENDS
        layer = sharing[int(adapter[1])] if adapter and int(adapter[1]) < len(sharing) else layer
        groups.setdefault(layer, {})[name] = shape
    return {
        group: LayerParameters({n: _elements(s) for n, s in members.items()}, members)
        for group, members in groups.items()
    }


def _group_program_weights(architecture: Architecture) -> dict[str, LayerParameters]:
    """Return the weights of our program by the layer that owns them."""
    ends = {**_unit_shapes(architecture, "embedding"), **_unit_shapes(architecture, "head")}
    groups = {ENDS: ends}
    groups |= {f"layer {i}": _unit_shapes(architecture, unit) for i, unit in enumerate(architecture.layer_units)}
    return {
        group: LayerParameters({n: _elements(s) for n, s in members.items()}, members)
        for group, members in groups.items()
    }


def _unit_shapes(architecture: Architecture, unit: str) -> dict[str, tuple[int, ...]]:
    program, sizes = unit_program(architecture.structure, unit), architecture.unit_architecture(unit).dims
    borrowed = borrowed_weights(architecture, unit)
    return {name: tuple(sizes[dim] for dim in program.dims(name)) for name in program.weights if name not in borrowed}


def _differences(theirs: Mapping[str, LayerParameters], ours: Mapping[str, LayerParameters]) -> Iterator[str]:
    """Yield what differs, in the order of the model: a tensor that nothing here accounts for, or a weight that it lacks."""
    for group in dict.fromkeys((*theirs, *ours)):
        left, right = theirs.get(group, LayerParameters({}, {})), ours.get(group, LayerParameters({}, {}))
        missing, spare = _match(left.elements, right.elements)
        unmatched = ", ".join(f"{name} {list(right.shapes[name])}" for name in spare) or "nothing"
        if missing:
            yield f"{group}: transformers has {missing[0]} {list(left.shapes[missing[0]])}; left for it here: {unmatched}"
        elif spare:
            yield f"{group}: transformers has nothing for {unmatched}"


def _match(theirs: Mapping[str, int], ours: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return the names that are not accounted for on either side: of the same size first, then sums of several, of either."""
    spare, missing = dict(ours), []
    for name, size in theirs.items():
        equal = next((weight for weight, elements in spare.items() if elements == size), None)
        if equal is None:
            missing.append(name)
        else:
            del spare[equal]
    left = _match_sums({name: theirs[name] for name in missing}, spare)
    spare = _match_sums(spare, left)
    return list(left), list(spare)


def _match_sums(totals: Mapping[str, int], parts: dict[str, int]) -> dict[str, int]:
    """Return the totals that are no sum of some parts, the smallest first; parts of others are removed."""
    left = {}
    for name in sorted(totals, key=lambda name: totals[name]):
        names = _parts_of(totals[name], sorted(parts.items(), key=lambda item: -item[1]))
        if names is None:
            left[name] = totals[name]
        for part in names or ():
            del parts[part]
    return left


def _parts_of(total: int, weights: Sequence[tuple[str, int]]) -> tuple[str, ...] | None:
    """Return weights that add up to a number of elements, the largest first; None if there are none."""
    if total == 0:
        return ()
    for index, (name, size) in enumerate(weights):
        if size <= total and (rest := _parts_of(total - size, weights[index + 1 :])) is not None:
            return (name, *rest)
    return None
