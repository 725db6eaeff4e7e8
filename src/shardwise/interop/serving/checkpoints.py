"""Checkpoints that engines load: the model and the formats that a name says, and a name for a model in given formats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from typing import Any

from shardwise.interop.frameworks.huggingface_hub_names import hub_model, hub_name
from shardwise.model import Architecture, load_model, model_names
from shardwise.serve import ServingFormats
from shardwise.values import parse_toml

# Ends of names of folders that are written here for formats that no published checkpoint has, with attention or experts apart.
_PART_SUFFIX = re.compile(r"[-_](attention|experts)-([a-z0-9_]+)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint by name: its model (None: not of the catalogue), its formats, and how they are known.

    `says_format` is False where nothing in the name says a format, so that 16 bits are assumed.
    """

    name: str
    architecture: Architecture | None
    formats: ServingFormats
    evidence: str
    says_format: bool


@cache
def _tables() -> Mapping[str, Any]:
    text = resources.files("shardwise.interop.serving").joinpath("checkpoints.toml").read_text(encoding="utf-8")
    return parse_toml(text, "checkpoints.toml")


def identify_checkpoint(name: str) -> Checkpoint:
    """Return what the name of a checkpoint says.

    >>> checkpoint = identify_checkpoint("nvidia/Llama-3.3-70B-Instruct-FP8")
    >>> checkpoint.architecture.name, str(checkpoint.formats)
    ('llama-3.3-70b', 'fp8')
    """
    lower = name.lower().rstrip("/")
    bare, stripped, parts = _strip_formats(lower)
    architecture = _catalogue_model(bare) or hub_model(bare) or hub_model(lower)
    for rule in _tables()["rules"]:
        if re.search(rule["pattern"], lower):
            return Checkpoint(
                name=name, architecture=architecture, formats=ServingFormats(**rule["formats"]),
                evidence=f"as published ({rule['source']})", says_format=True,
            )  # fmt: skip
    if stripped or parts:
        formats = ServingFormats(weights=stripped[0] if stripped else "bf16", **parts)
        evidence = "as the checkpoint's name says"
    else:
        formats, evidence = ServingFormats(), "16 bits: the checkpoint's name says no format"
    return Checkpoint(
        name=name, architecture=architecture, formats=formats, evidence=evidence, says_format=bool(stripped or parts)
    )


def _catalogue_model(name: str) -> Architecture | None:
    """Return the catalogue's model that a folder has the name of, if any."""
    folder = name.rsplit("/", 1)[-1]
    return load_model(folder) if folder in model_names() else None


def _strip_formats(name: str) -> tuple[str, list[str], dict[str, str]]:
    """Return a name without the suffixes of formats, the formats that they say, and those of parts."""
    weights: list[str] = []
    parts: dict[str, str] = {}
    while True:
        match = _PART_SUFFIX.search(name)
        if match:
            parts[match[1]] = match[2]
            name = name[: match.start()]
            continue
        suffix = next((entry for entry in _tables()["suffixes"] if re.search(f"{entry['pattern']}$", name)), None)
        if suffix is None:
            return name, weights, parts
        weights.append(suffix["weights"])
        name = re.sub(f"{suffix['pattern']}$", "", name)


# Ends of names that are written, as `suffixes` reads them.
WRITTEN_SUFFIXES: Mapping[str, str] = {
    "bf16": "", "fp8": "-FP8", "fp8_block": "-FP8-BLOCK", "int8": "-INT8", "nvfp4": "-NVFP4", "mxfp4": "-MXFP4",
    "int4": "-INT4", "int4_g32": "-INT4-G32",
}  # fmt: skip


def name_checkpoint(architecture: Architecture, formats: ServingFormats) -> str:
    """Return the name of a checkpoint of a model in some formats: a published one, or else a folder that is to hold it.

    >>> import shardwise as sw
    >>> name_checkpoint(sw.load_model("qwen3-32b"), ServingFormats(weights="fp8_block"))
    'Qwen/Qwen3-32B-FP8'
    >>> name_checkpoint(sw.load_model("qwen3-32b"), ServingFormats(weights="int8"))
    'checkpoints/Qwen3-32B-INT8'
    """
    return next(
        (name for name in _candidate_names(architecture, formats) if _says(name, architecture, formats)),
        f"checkpoints/{_folder_name(architecture, formats)}",
    )


def _candidate_names(architecture: Architecture, formats: ServingFormats) -> Iterator[str]:
    """Yield names of published checkpoints of a model, that of the catalogue first."""
    published = hub_name(architecture)
    if published:
        yield published
    for entry in _tables()["published"]:
        if entry["model"] == architecture.name and entry["weights"] == formats.weights:
            yield entry["checkpoint"]


def _says(name: str, architecture: Architecture, formats: ServingFormats) -> bool:
    """Return whether a name says this model in these formats, the cache's aside."""
    checkpoint = identify_checkpoint(name)
    return checkpoint.architecture == architecture and weight_formats(checkpoint.formats) == weight_formats(formats)


def weight_formats(formats: ServingFormats) -> Mapping[str, str]:
    """Return the formats of all parts of the weights by name, whether they are named or not."""
    return {
        "weights": formats.weights, "attention": formats.attention_format.name, "experts": formats.expert_format.name,
    }  # fmt: skip


def _folder_name(architecture: Architecture, formats: ServingFormats) -> str:
    """Return the name of a folder for a model in some formats, from which both are read back."""
    hub_base = (hub_name(architecture) or architecture.name).split("/")[-1]
    base = hub_base if identify_checkpoint(hub_base).architecture == architecture else architecture.name
    parts = {name: value for name, value in asdict(formats).items() if name in ("attention", "experts")}
    ends = "".join(f"-{name}-{value}" for name, value in parts.items() if value and value != formats.weights)
    suffix = WRITTEN_SUFFIXES[formats.weights]
    if not suffix and identify_checkpoint(base + ends).formats.weight_format != formats.weight_format:
        suffix = "-BF16"  # the model's published checkpoint is quantized
    name = f"{base}{suffix}{ends}"
    return name if ends or suffix or _says(name, architecture, formats) else f"{base}-BF16"


def is_folder_name(name: str) -> bool:
    """Return whether a name is that of a folder that `name_checkpoint` makes up."""
    return name.startswith("checkpoints/")
