"""What a layer keeps for its backward pass and what it computes again under a layout, tensor by tensor and kernel by kernel."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.cost.budget import Layer, layers_of
from shardwise.cost.formats import Keys
from shardwise.cost.pricing import Pricing
from shardwise.derive.derivation import Unit
from shardwise.derive.products import operands


@dataclass(frozen=True, slots=True)
class KeptTensor:
    """A tensor that is kept, and its bytes."""

    tensor: str
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A kernel or a collective that runs again: what it makes or moves, its seconds, and the bytes that would keep of this what
    the backward pass reads."""

    what: str
    tensors: tuple[str, ...]
    seconds: float
    spared_bytes: float


@dataclass(frozen=True, slots=True)
class LayerRecompute:
    """One layer of a kind, of which the model has `num_layers`, in one micro-batch on one device."""

    layer: str
    num_layers: int
    kept: tuple[KeptTensor, ...]
    recomputed: tuple[Recomputed, ...]

    @property
    def kept_bytes(self) -> float:
        """Bytes of all that is kept."""
        return sum(one.num_bytes for one in self.kept)

    @property
    def seconds(self) -> float:
        """Seconds of all that runs again."""
        return sum(one.seconds for one in self.recomputed)


def layers_recomputed(pricing: Pricing) -> tuple[LayerRecompute, ...]:
    """Each kind of layer of a model, under a layout's policy."""
    dense = sum(pricing.dense)
    counts = {"dense_block": dense, "block": sum(pricing.layers) - dense}
    return tuple(
        LayerRecompute(
            kind,
            counts[kind],
            tuple(_kept(layer, pricing)),
            tuple(_again(layer, layer.unit(pricing.family.recompute), pricing)),
        )
        for kind, layer in layers_of(pricing).items()
    )


def _kept(layer: Layer, pricing: Pricing) -> Iterator[KeptTensor]:
    unit, formats = layer.unit(pricing.family.recompute), pricing.pricer.formats
    keys = Keys(unit, operands(unit.phases(), unit.tensors, unit.saved))
    for name, spec in unit.saved.items():
        yield KeptTensor(name, float(formats.saved_bytes(keys.saved([(name, spec)]), pricing.values)))


def _again(layer: Layer, unit: Unit, pricing: Pricing) -> Iterator[Recomputed]:
    """Kernels in order, then the collectives that go over several devices."""
    parts, pricer = pricing.pricer.parts(pricing.family, layer.kind), pricing.pricer
    reads = set(layer.plain.backward.program.inputs) - set(unit.saved)
    for kernel in (one for one in parts.kernels if one.phase == "recompute"):
        spared = sum(layer.sizes[name] for name in kernel.outputs if name in reads)
        yield Recomputed(kernel.kind, kernel.outputs, float(pricer.kernel_s(kernel, parts, pricing.values)), spared)
    for moved in parts.collectives:
        if moved.phase == "recompute" and not moved.carries_weights and pricing.values.degree(moved.axes) > 1:
            seconds = float(pricer.collective_s(moved, parts, pricing.values, pricing.links))
            yield Recomputed(str(moved.kind), moved.tensors, seconds, 0.0)
