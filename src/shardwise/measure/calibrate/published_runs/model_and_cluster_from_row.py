"""A row's sizes as an `Architecture`, its chip, devices and links as a `Cluster`, and its software as a stack.

Norms, biases and positions, which have no column, follow the model's family. Sizes that sources leave out are filled if others
determine them:

- layers of a dense model: as many as the parameters in its name need; of the published names that have both, BLOOM's
  sizing, which is where it is needed, gives the number exactly for 107 of 131
- query heads: the number whose width is closest to 128, of those that tp and the model's width allow
- vocabulary of a GPT-3: 51,200, that of GPT-2's tokenizer padded as Megatron does, as all others of Megatron, NeMo, Pax
  and MaxText have it
- adapters (LoRA): of rank 8, on queries, keys and values alone, as NeMo's and Megatron Bridge's recipes for these
  benchmarks have them (`peft.dim = 8`, `peft.target_modules = ["linear_qkv"]`)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from shardwise.hardware import (
    Calibration,
    Chip,
    Cluster,
    Stack,
    Switched,
    Topology,
    chip_names,
    get_catalog_entry,
    load_chip,
    match_stack,
    published_calibration,
    relative_clock,
)
from shardwise.hardware.cluster import Shorthand, build_shorthand_topology, resize_tiers
from shardwise.measure.calibrate.published_runs.run_table import RowCells, SkippedRow
from shardwise.model import Architecture
from shardwise.model.structure import IS_GATED
from shardwise.values.input_texts import parse_integer, parse_number

MOST_LAYERS = 10_000  # far above any model; stages are counted one by one
MOST_WIDTH = 10**6  # likewise; numbers of heads are tried one by one
HEAD_WIDTH, GPT3_VOCABULARY = 128, 51_200
LORA = {"lora_rank": 8, "lora_targets": ("qkv",)}
EVERYWHERE = ("qkv", "attention_out", "mlp")
# By what the model's name says; the first that fits. Sources: the models' reports and the modelling code of transformers.
# These choices move parameters and bytes by less than a percent.
STRUCTURES: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (r"\bmpt", {"mlp": "gelu", "norm": "layer", "positions": "none"}),  # ALiBi, no bias
    (r"bloom", {"mlp": "gelu", "norm": "layer", "norm_bias": True, "positions": "none", "bias": EVERYWHERE}),  # ALiBi
    (r"nemotron", {"mlp": "relu", "norm": "layer", "norm_bias": True}),  # squared ReLU
    (r"gemma", {"mlp": "geglu", "post_norms": True, "qk_norm": True}),
    (r"qwen-?3", {"qk_norm": True}),
    (r"qwen-?2", {"bias": ("qkv",)}),
    (r"gpt[ _-]?oss", {"mlp": "clamped_swiglu", "sinks": True, "bias": ("qkv", "attention_out", "router", "experts")}),
)
GPT = {"mlp": "gelu", "norm": "layer", "norm_bias": True, "bias": EVERYWHERE}  # GPT-2's block, and learned positions


def read_architecture(cells: RowCells) -> Architecture:
    """Return the model of a row. Raises `SkippedRow` if a size is not stated, `InputError` if sizes contradict."""
    missing_text = "architecture"
    d_model = cells.require_size("d_model", missing_text)
    heads, vocab = _heads(cells, d_model), _vocabulary(cells)
    layers = cells.size("layers") or _layers_by_name(cells, d_model, vocab)
    if layers > MOST_LAYERS:
        raise SkippedRow("no number of layers", f"{layers}; at most {MOST_LAYERS:,} are planned for")
    values: dict[str, Any] = {
        "name": cells.text("model") or "model", "num_layers": layers, "d_model": d_model, "num_heads": heads,
        "num_kv_heads": cells.size("n_kv_heads") or heads,
        "head_dim": cells.size("head_dim") or max(d_model // heads, 1), "vocab_size": vocab,
        "tied_embeddings": bool(cells.flag("tied_embeddings")),
    }  # fmt: skip
    values |= (
        _experts(cells, layers) if cells.count("n_experts") else {"d_ff": cells.require_size("d_ff", missing_text)}
    )
    values |= _latent(cells) if cells.count("mla_kv_lora") else {}
    values |= _windows(cells, layers) | _structure(cells)
    if cells.text("task").lower() == "lora":
        values |= LORA
    if "w/ mtp" in values["name"].lower():
        values["num_predict_layers"] = 1  # as in DeepSeek-V3's report
    return Architecture(**values)


def _vocabulary(cells: RowCells) -> int:
    is_gpt3 = re.search(r"gpt-?3", cells.text("model").lower())
    return cells.size("vocab") or (GPT3_VOCABULARY if is_gpt3 else cells.require_size("vocab", "architecture"))


def _heads(cells: RowCells, d_model: int) -> int:
    """Return the query heads as stated, or those of the usual width. Raises `SkippedRow` if none divides."""
    stated, tp = cells.size("n_heads"), cells.size("tp") or 1
    if stated or d_model > MOST_WIDTH:
        return stated or cells.require_size("n_heads", "architecture")
    possible = [n for n in range(tp, d_model + 1, tp) if d_model % n == 0]
    if not possible:
        return cells.require_size("n_heads", "architecture")
    return min(possible, key=lambda n: abs(d_model // n - HEAD_WIDTH))


def _layers_by_name(cells: RowCells, d_model: int, vocab: int) -> int:
    """Return the layers of a dense model without grouped queries from the parameters in its name, such as 183B."""
    match = re.search(r"\b(\d{1,4}(?:\.\d{1,3})?)b\b", cells.text("model").lower())
    if not match or cells.count("n_experts") or (cells.size("n_kv_heads") or 0) != (cells.size("n_heads") or 0):
        return cells.require_size("layers", "architecture")
    num_matrices = 3 if cells.flag("gated_mlp") else 2
    layer_params = 4 * d_model**2 + num_matrices * d_model * cells.require_size("d_ff", "architecture")
    end_params = (1 if cells.flag("tied_embeddings") else 2) * vocab * d_model
    return max(round((parse_number(match[1]) * 1e9 - end_params) / layer_params), 1)


def _structure(cells: RowCells) -> dict[str, Any]:
    name, gated = cells.text("model").lower(), cells.flag("gated_mlp")
    if gated is None:
        raise SkippedRow("architecture not stated", "gated_mlp")
    for pattern, structure in STRUCTURES:
        if re.search(pattern, name) and IS_GATED[structure.get("mlp", "swiglu")] == gated:
            return dict(structure)
    if gated:
        return {}
    return {**GPT, "positions": "learned", "max_positions": cells.require_size("seq_len", "sequence length")}


def _experts(cells: RowCells, layers: int) -> dict[str, Any]:
    """Return experts of width `moe_d_ff`, shared ones side by side, with the dense layers first.

    If experts alternate with dense layers (`moe_every` = 2) the dense ones come first too: the same work, but other
    pipeline stages do it.
    """
    width = cells.size("moe_d_ff") or cells.require_size("d_ff", "architecture")
    shared_width = cells.count("shared_expert_d_ff") or (cells.count("n_shared_experts") or 0) * width
    moe_every = cells.size("moe_every") or 1
    num_dense_layers = cells.count("n_dense_layers")
    num_dense_layers = layers - layers // moe_every if num_dense_layers is None else num_dense_layers
    return {
        "d_ff": width, "num_experts": cells.require_size("n_experts", "architecture"),
        "experts_per_token": cells.require_size("top_k", "architecture"), "shared_expert_width": shared_width,
        "num_dense_layers": num_dense_layers,
        "dense_d_ff": cells.require_size("d_ff", "architecture") if num_dense_layers else 0,
    }  # fmt: skip


def _latent(cells: RowCells) -> dict[str, Any]:
    """Return the sizes of multi-head latent attention: a key has its own part and the rotary one; each head has a key."""
    rope = cells.require_size("mla_qk_rope", "architecture")
    return {
        "kv_lora_rank": cells.require_size("mla_kv_lora", "architecture"),
        "q_lora_rank": cells.count("mla_q_lora") or 0, "rope_head_dim": rope,
        "v_head_dim": cells.require_size("mla_v_dim", "architecture"),
        "head_dim": cells.require_size("mla_qk_nope", "architecture") + rope,
        "num_kv_heads": cells.require_size("n_heads", "architecture"),
    }  # fmt: skip


def _windows(cells: RowCells, layers: int) -> dict[str, Any]:
    """Return a window on `window_layers` of the layers: on all but every n-th."""
    window = cells.count("window")
    if not window:
        return {}
    num_windowed = cells.count("window_layers")
    if num_windowed is None or num_windowed == layers:
        return {"sliding_window": window}
    num_global = layers - num_windowed
    global_every = layers // (num_global + 1) + 1  # the least n of which layers // n is no more
    if 0 < num_global < layers and layers // global_every == num_global:
        return {"sliding_window": window, "global_every": global_every}
    raise SkippedRow("windows on other layers than all but every n-th", f"{num_windowed} of {layers}")


# Memory kinds of which a chip's name tells another bandwidth than the catalogue's.
# Source: pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: H100 with HBM2e at 2.4 TB/s.
NAMED_BANDWIDTHS = {("h100", "hbm2e"): 2.4e12}
TWO_CORES = ("tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5p")  # N in their names (v5p-256) counts TensorCores, two to a chip


def read_cluster(cells: RowCells, user_cluster: Cluster | None = None) -> Cluster:
    """Return the cluster of a row: of a chip of the catalogue, or `user_cluster` if the row names its chip. Raises
    `SkippedRow` if the chip is unknown, `InputError` if the vendor has no such cluster."""
    text = cells.text("chip").lower()
    if user_cluster is not None and text == user_cluster.chip.name.lower():
        return _read_user_cluster(cells, user_cluster)
    name = catalogue_name(text)
    chip = _read_chip(load_chip(name), cells, text)
    num_devices = cells.size("n_devices") or _count_in_name(text, name)
    if num_devices is None:
        raise SkippedRow("number of devices not stated", "n_devices")
    if "torus" in get_catalog_entry(name):
        num_slices, topology = _read_slices(cells, name, chip, num_devices)
        suffix = f" in {num_slices} slices" if num_slices > 1 else ""
        return Cluster(name=f"{name}:{num_devices}{suffix}", chip=chip, topology=topology)
    topology = build_shorthand_topology(Shorthand(name, (num_devices,), False, None), chip)
    assert isinstance(topology, Switched)
    return Cluster(name=f"{name}:{num_devices}", chip=chip, topology=_read_network(cells, topology))


def _read_user_cluster(cells: RowCells, user_cluster: Cluster) -> Cluster:
    """Return the cluster over the devices of a row, with the network that the row states."""
    num_devices = cells.size("n_devices")
    if num_devices is None:
        raise SkippedRow("number of devices not stated", "n_devices")
    if not isinstance(user_cluster.topology, Switched):
        if num_devices != user_cluster.num_devices:
            raise SkippedRow("of another torus than the cluster's", f"{num_devices} chips")
        return user_cluster
    network = resize_tiers(user_cluster.topology, user_cluster.chip, num_devices)
    if network is None:
        raise SkippedRow("devices do not divide evenly over the cluster's tiers", f"{num_devices} devices")
    return replace(user_cluster, topology=_read_network(cells, network))


def catalogue_name(text: str) -> str:
    """Return the catalogue's name of a chip: A100-80GB-SXM is a100-80gb, TPU-v5p-256 is tpu-v5p. Raises `SkippedRow`
    for a chip that is not stated or not in the catalogue."""
    if not text:
        raise SkippedRow("chip not stated")
    parts = re.split(r"[\s_\-]+", text.lower().removeprefix("nvidia").removeprefix("amd").strip())
    if re.fullmatch(r"v\d+[a-z]?", parts[0]) and "tpu-" + parts[0] in chip_names():
        parts = ["tpu", *parts]
    form_factor = [part for part in parts if part == "pcie"]  # another product, wherever the name has it
    stem = [part for part in parts if part != "pcie"]
    names = ("-".join(stem[:length] + form_factor) for length in range(len(stem), 0, -1))
    for chip_name in (name for name in names if name in chip_names()):
        return chip_name
    raise SkippedRow("chip not in the catalogue", text[:40])


def _count_in_name(text: str, name: str) -> int | None:
    match = re.fullmatch(r"(?:tpu-)?v\d+[a-z]?-(\d+)", text)
    return max(parse_integer(match[1]) // (2 if name in TWO_CORES else 1), 1) if match and len(match[1]) < 8 else None


def _read_chip(chip: Chip, cells: RowCells, text: str) -> Chip:
    """Return the catalogue's chip with the stated memory, and with a power limit or a kind of memory from its name."""
    memory_gb = cells.number("chip_mem_gb")
    if memory_gb and not _is_size(memory_gb, chip.memory_bytes):
        chip = replace(chip, memory_bytes=memory_gb * 1e9)
    for (name, kind), bytes_per_s in NAMED_BANDWIDTHS.items():
        if chip.name == name and kind in text:
            chip = replace(chip, memory_bytes_per_s=bytes_per_s)
    limit = re.search(r"\b(\d{2,4})w\b", text)
    if limit and chip.power_w and parse_number(limit[1]) < chip.power_w:
        power = parse_number(limit[1])
        chip = replace(chip, power_w=power)
        chip = replace(chip, matmul_fraction=chip.matmul_fraction * relative_clock(chip))
    return chip


def _is_size(stated_gb: float, memory_bytes: float) -> bool:
    """Return True if a row's "16 GB" is this memory: sources print GB for both GB and GiB."""
    return any(abs(stated_gb * unit / memory_bytes - 1) <= 0.01 for unit in (1e9, 2.0**30))


def _read_network(cells: RowCells, network: Switched) -> Switched:
    """Return the network with the rate between nodes that the row states, in Gb/s of a card or a node. A rate alone is
    that of a node, as IBM states it for its A100s."""
    stated = re.search(r"(?:(\d+)\s*x\s*)?[^\d]*?(\d+)\s*gb(?:ps|/s|\b)", cells.text("inter_node_link").lower())
    if not stated or len(network.tiers) < 2:
        return network
    text = cells.text("inter_node_link").lower()
    chips_per_node = cells.size("chips_per_node") or network.tiers[0].size
    node_bytes_per_s = parse_integer(stated[1] or "1") * parse_integer(stated[2]) * 1e9 / 8
    is_per_chip = re.search(r"per (gpu|device|chip)|/(gpu|device|chip)", text)
    bytes_per_s = node_bytes_per_s if is_per_chip else node_bytes_per_s / chips_per_node
    if re.search(rf"{stated[2]}\s*GB/s", cells.text("inter_node_link")):  # bytes, not bits
        bytes_per_s *= 8.0
    if not 0 < bytes_per_s < 1e13:
        raise SkippedRow("no network", f"inter_node_link is {text[:40]!r}")
    return Switched(tiers=(*network.tiers[:-1], replace(network.tiers[-1], bytes_per_s=bytes_per_s)))


def _read_slices(cells: RowCells, name: str, chip: Chip, num_chips: int) -> tuple[int, Topology]:
    """Return number and network of TPU slices: their shape as stated, or the vendor's for that many chips."""
    match = re.search(r"between (\d{1,6}) slices", cells.text("inter_node_link").lower())
    num_slices = parse_integer(match[1]) if match else 1
    if num_slices < 1 or num_chips % num_slices:
        raise SkippedRow("devices do not divide into slices", f"{num_chips} in {num_slices}")
    chips_per_slice = num_chips // num_slices
    stated = re.search(r"\b(\d{1,4}(?:x\d{1,4}){1,2})\b", cells.text("intra_node_link").lower())
    shape = tuple(map(parse_integer, stated[1].split("x"))) if stated else ()
    if math.prod(shape) != chips_per_slice:
        shape = slice_shape(chips_per_slice, get_catalog_entry(name)["torus"]["num_axes"])
    return num_slices, build_shorthand_topology(
        Shorthand(name, shape, False, num_slices if num_slices > 1 else None), chip
    )


def slice_shape(num_chips: int, num_axes: int) -> tuple[int, ...]:
    """Return the most cubic shape that Google offers: sides of 1, 2, 4, 8, 16 on 2D tori; 1, 2, multiples of 4 on 3D.
    Source: Google Cloud documentation, TPU configurations of v4, v5e, v5p and v6e."""
    allowed = [1, 2, 4, 8, 16, 32] if num_axes == 2 else [1, 2, *range(4, 65, 4)]
    shapes = list(_shapes(num_chips, num_axes, allowed))
    if not shapes:
        raise SkippedRow("no slice of so many chips", f"{num_chips} on {num_axes} axes")
    return min(shapes, key=lambda shape: (sum(shape), shape))


def _shapes(num_chips: int, num_axes: int, allowed: list[int]) -> Iterator[tuple[int, ...]]:
    """Yield the non-decreasing allowed sides whose product is `num_chips`."""
    if num_axes == 1:
        if num_chips in allowed:
            yield (num_chips,)
        return
    for side in allowed:
        if num_chips % side == 0:
            yield from (
                (side, *sides) for sides in _shapes(num_chips // side, num_axes - 1, allowed) if sides[0] >= side
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSoftware:
    """Software of a row. `fused_attention`: scores stay on the chip. `synchronises`: the host waits for the router's
    counts. `clock`: sustained clock over the chip's usual one."""

    stack: Stack
    fused_attention: bool
    has_capacity: bool
    clock: float

    def calibration(self, chip: Chip) -> Calibration:
        """Return the published calibration of the chip under this software."""
        return self.apply_to(published_calibration(chip.name, self.stack))

    def apply_to(self, calibration: Calibration) -> Calibration:
        """Return a calibration with what the row states."""
        return replace(
            calibration,
            clock=calibration.clock * self.clock,
            fused_attention=self.fused_attention,
            has_capacity=self.has_capacity,
        )


def read_software(cells: RowCells, clock: float) -> RowSoftware:
    """Return the software of a row. If tokens over a capacity are dropped, the host knows all sizes in advance.

    A run that says that nothing was compiled is of its software without torch.compile, where that is a stack of its own.
    """
    is_eager = cells.flag("compile") is False
    stack = match_stack(f"eager {cells.text('software')}" if is_eager else cells.text("software"))
    flash_attention, routing_text = cells.flag("flash_attn"), cells.text("model") + cells.text("notes")
    return RowSoftware(
        stack=stack, fused_attention=not stack.unfused_attention if flash_attention is None else flash_attention,
        has_capacity=bool(re.search(r"token-?drop|capacity", routing_text)), clock=clock,
    )  # fmt: skip
