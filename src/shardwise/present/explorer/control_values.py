"""Values of the page's controls: a control and its options, the sizes that it offers, and presets of jobs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from shardwise.hardware import get_catalog_entry
from shardwise.hardware.cluster import parse_shorthand
from shardwise.present.explorer.request import ViewRequest
from shardwise.values import ShardwiseError, format_binary

Kind = Literal["slider", "select", "checkbox"]
Edit = Mapping[str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of a control: its edit of the address (None removes the key), the problem with it ("": none), its source."""

    value: str
    edit: Edit
    problem: str = ""
    note: str = ""

    def payload(self) -> dict[str, Any]:
        """Return plain data; maximum options have no note."""
        return {
            "value": self.value,
            "edit": self.edit,
            "problem": self.problem,
            **({"note": self.note} if self.note else {}),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A choice of a group, with its current value. A slider's options have an order, a checkbox's are false and true."""

    name: str
    label: str
    group: str
    value: str
    kind: Kind
    options: tuple[Option, ...]

    def payload(self) -> dict[str, Any]:
        """Return plain data."""
        # `dataclasses.asdict` copies every edit, which takes longer than pricing a layout.
        return {
            "name": self.name, "label": self.label, "group": self.group, "value": self.value, "kind": self.kind,
            "options": [option.payload() for option in self.options],
        }  # fmt: skip


def slider(name: str, label: str, group: str, value: object, options: Iterable[Option]) -> Control:
    """Return a control whose options have an order."""
    return Control(name=name, label=label, group=group, value=option_text(value), kind="slider", options=tuple(options))


def select(name: str, label: str, group: str, value: object, options: Iterable[Option]) -> Control:
    """Return a control that chooses a name."""
    return Control(name=name, label=label, group=group, value=option_text(value), kind="select", options=tuple(options))


def checkbox(name: str, label: str, group: str, value: bool, options: Iterable[Option]) -> Control:
    """Return a control that is on or off."""
    return Control(
        name=name, label=label, group=group, value=option_text(value), kind="checkbox", options=tuple(options)
    )


def option_text(value: object) -> str:
    """Return a value as an address writes it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


MAX_OPTIONS = 24  # of a slider
MAX_SIZE = 1 << 14  # devices of a slider, and degrees


def divisors(total: int, current: int, maximum: int) -> list[int]:
    """Return the divisors of a number up to a maximum, and the current value."""
    exact = [number for number in range(1, min(total, maximum, MAX_SIZE) + 1) if total % number == 0]
    return sorted({*exact[:MAX_OPTIONS], current})


def doublings(current: int, minimum: int, maximum: int) -> list[int]:
    """Return the powers of two from a minimum to a maximum, and the current value with its halves and doubles."""
    powers = {1 << exponent for exponent in range(40) if minimum <= 1 << exponent <= maximum}
    multiples = {current * 2**step for step in range(3)}
    multiples |= {current // 2**step for step in range(3) if current % 2**step == 0}
    return sorted({*powers, current} | {number for number in multiples if minimum <= number <= maximum})[
        : 2 * MAX_OPTIONS
    ]


def has_shorthand(cluster: str) -> bool:
    """Return whether a name of a cluster is CHIP:SIZE, of which there are other sizes."""
    try:
        parse_shorthand(cluster)
    except ShardwiseError:
        return False
    return True


def num_devices_of(cluster: str) -> int:
    """Return the devices of a cluster's shorthand."""
    shorthand = parse_shorthand(cluster)
    return math.prod(shorthand.shape) * (shorthand.num_pods or 1)


def other_sizes(cluster: str) -> list[str]:
    """Return clusters of other sizes: counts for switched chips, shapes that double their smallest dim for a torus."""
    shorthand = parse_shorthand(cluster)
    if len(shorthand.shape) == 1:
        return [f"{shorthand.chip}:{size}" for size in doublings(shorthand.shape[0], 8, MAX_SIZE)]
    shapes, shape = [], [4] * len(shorthand.shape)
    while math.prod(shape) <= MAX_SIZE:
        shapes.append(tuple(shape))
        shape[shape.index(min(shape))] *= 2
    sizes = sorted({*(tuple(sorted(shape)) for shape in shapes), shorthand.shape}, key=math.prod)
    return [f"{shorthand.chip}:{'x'.join(map(str, size))}" for size in sizes]


def cluster_of_chip(name: str, num_devices: int) -> str:
    """Return a cluster of a chip: with so many devices, on a torus the largest shape that they fill."""
    chip_entry = get_catalog_entry(name)
    if "torus" not in chip_entry:
        return f"{name}:{num_devices}"
    smallest = f"{name}:{'x'.join(['4'] * chip_entry['torus']['num_axes'])}"
    return [smallest, *(size for size in other_sizes(smallest) if num_devices_of(size) <= num_devices)][-1]


NO_PRESET = "none"


class Preset(NamedTuple):
    """A known job by the values of an address, with its source."""

    name: str
    model: str
    cluster: str
    batch_tokens: int
    seq_len: int
    precision: str
    source: str

    @property
    def edit(self) -> Edit:
        """Return its edit of the address."""
        return {
            "model": self.model, "cluster": self.cluster, "batch_tokens": format_binary(self.batch_tokens),
            "seq_len": str(self.seq_len), "precision": self.precision, "layout": None, "stack": None, "overlap": None,
        }  # fmt: skip


PRESETS = (
    Preset("GPT-2 on 8 A100", "gpt-2", "a100-40gb:8", 480 * 1024, 1024, "bf16",
           "karpathy/nanoGPT, config/train_gpt2.py: 480 sequences of 1,024 tokens on a node of 8 A100 with 40 GB"),
    Preset("GPT-3 175B on 1,024 A100", "gpt-3-175b", "a100-80gb:1024", 1536 * 2048, 2048, "bf16",
           "Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021, section 5.1"),
    Preset("Llama 3 70B on 8,960 TPU v5p", "llama-3-70b", "tpu-v5p:16x20x28", 1024 * 4096, 4096, "bf16",
           "Austin et al., How to Scale Your Model, 2025, Training LLaMA 3 on TPUs"),
    Preset("Llama 3 405B on 16,384 H100", "llama-3-405b", "h100:16384", 2048 * 8192, 8192, "bf16",
           "Llama Team, The Llama 3 Herd of Models, 2024, table 4"),
    Preset("DeepSeek-V3 on 2,048 H800", "deepseek-v3", "h800:2048", 15360 * 4096, 4096, "fp8_deepseek_v3",
           "DeepSeek-AI, DeepSeek-V3 Technical Report, arXiv 2412.19437, sections 3 and 4.2"),
)  # fmt: skip


def preset_control(request: ViewRequest, group: str) -> Control:
    """Return the choice of a preset, which removes changed values of the model and the job."""
    removed: Edit = {key: None for key, _ in request.state.changes}
    options = (Option(value=preset.name, edit={**removed, **preset.edit}, note=preset.source) for preset in PRESETS)
    chosen = next((preset.name for preset in PRESETS if _is_preset(request, preset)), NO_PRESET)
    no_preset = [Option(value=NO_PRESET, edit={})] if chosen == NO_PRESET else []
    return select("preset", "preset", group, chosen, [*no_preset, *options])


def _is_preset(request: ViewRequest, preset: Preset) -> bool:
    state = request.state
    return not state.changes and preset[1:6] == (
        state.model, state.cluster, state.batch_tokens, state.seq_len, state.precision,
    )  # fmt: skip
