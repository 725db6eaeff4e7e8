"""Passes of inference on virtual devices: a model whose cache rests on the devices between passes.

Each stage of a pipeline has devices of its own, with the weights and caches of its layers. `ServedModel.run` computes new tokens
of some rows and gives logits. Constants say which sequence and position each token has and which slot it takes, so that a pass is
a chunk of a prefill, a decode of a batch, or both (`model.operations.cached_tokens`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.derive.inference_unit import InferenceScheme, InferenceUnit, derive_inference_unit
from shardwise.model import Architecture
from shardwise.model.carried_tensors import CarriedSource, carried_sources
from shardwise.model.inference_program import NEXT, cache_names
from shardwise.model.operations import SLOTS
from shardwise.model.structure import WindowKind
from shardwise.run.numpy.collectives import Shards
from shardwise.run.numpy.devices import MovedElements, VirtualDevices
from shardwise.run.numpy.kernels import Router
from shardwise.sharding import Mesh, Spec
from shardwise.values import InputError

Array = NDArray[Any]
LiveShards = dict[tuple[str, Spec], Shards]
UNLIMITED = 2**62  # a window that bounds nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTokens:
    """New tokens of a pass, [B, T] each: token ids, positions in their sequences, numbers of the sequences (below zero: padding),
    and slots of the cache (below zero: none). `picked` [B, j] are the tokens of each row whose next token is wanted."""

    ids: Array
    positions: Array
    sequences: Array
    slots: Array
    picked: Array


@dataclass
class ServedModel:
    """A model on the devices of a mesh, with `num_rows` rows of `num_slots` slots.

    `weights` are full arrays by unit of the model ("embedding", "layers.0", ..., "head") and name. Layers are split over
    `num_stages` groups of devices. `moved` counts the elements that all devices received, by kind and axes of the collective.
    """

    architecture: Architecture
    scheme: InferenceScheme
    mesh: Mesh
    weights: Mapping[str, Mapping[str, Array]]
    num_rows: int
    num_slots: int
    num_stages: int = 1
    moved: MovedElements = field(default_factory=Counter)
    hidden: Shards = field(default_factory=list)  # the last layer's hidden states of the last pass
    caches: dict[str, LiveShards] = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = (self.num_rows, self.num_slots)
        self.slot_positions, self.slot_sequences = np.zeros(shape, dtype=int), np.full(shape, -1)
        self.loaded: dict[str, LiveShards] = {}

    @property
    def layers(self) -> tuple[str, ...]:
        return self.architecture.layer_units

    def stage_of(self, layer: int) -> int:
        """Return the pipeline stage of a layer: stages have equal numbers of layers, up to one."""
        return layer * self.num_stages // len(self.layers)

    def run(self, tokens: NewTokens, *, absorbs_latent: bool = False) -> Array:
        """Compute new tokens and return the logits [B, j, V] of the picked ones; their keys and values join the cache."""
        scheme = replace(self.scheme, absorbs_latent=absorbs_latent)
        self._require_unshared_rows(tokens)
        rows, new = np.nonzero(tokens.slots >= 0)
        self.slot_positions[rows, tokens.slots[rows, new]] = tokens.positions[rows, new]
        self.slot_sequences[rows, tokens.slots[rows, new]] = tokens.sequences[rows, new]
        stages = [self._devices(tokens) for _ in range(self.num_stages)]
        embedding = derive_inference_unit(scheme, "embedding")
        results = [[*self._run_unit(stages[0], embedding, "embedding", {}).values()]]  # of each unit
        sources = carried_sources(self.architecture)
        for layer, name in enumerate(self.layers):
            unit = derive_inference_unit(scheme, name)
            devices = stages[self.stage_of(layer)]
            self._set_window(devices, self.architecture.attention_window(layer), unit.scheme.structure.window_kind)
            inputs = {"x": results[-1][0], **_carried_inputs(results, sources[layer])}
            results.append([*self._run_unit(devices, unit, f"layers.{layer}", inputs).values()])
        x = results[-1][0]
        self.hidden = x
        head = derive_inference_unit(scheme, "head")
        self._run_unit(stages[-1], head, "head", {"x": x})
        (logits,) = head.program.outputs
        for devices in stages:
            self.moved.update(devices.moved)
        return stages[-1].gather_array(logits, head.forward.specs[logits])

    def _require_unshared_rows(self, tokens: NewTokens) -> None:
        """Raise `InputError` for rows that a recurrence cannot take: its state is that of one sequence."""
        if not any(layer.recurrence for layer in self.architecture.layer_architectures.values()):
            return
        if np.any(tokens.sequences != tokens.sequences[:, :1]):
            raise InputError(
                f"a pass of {self.architecture.name}: rows have tokens of several sequences, or padding; rows of one sequence, "
                "all as long, are required where a model has recurrences"
            )

    def draft(self, tokens: NewTokens, *, absorbs_latent: bool = False) -> Array:
        """Run the module of multi-token prediction on the hidden states of the last pass and the tokens that follow each, and
        return the logits [B, j, V] of the tokens after these.

        `tokens` has the ids of the following tokens, and all else as in that pass.
        """
        unit = derive_inference_unit(replace(self.scheme, absorbs_latent=absorbs_latent), "predict")
        devices = self._devices(tokens)
        self._set_window(devices, None, "sliding")
        self.hidden, *_ = self._run_unit(devices, unit, "predict.0", {"x": self.hidden}).values()
        logits = unit.program.outputs[1]
        self.moved.update(devices.moved)
        return devices.gather_array(logits, unit.forward.specs[logits])

    def _devices(self, tokens: NewTokens) -> VirtualDevices:
        num_rows, num_new = tokens.ids.shape
        sizes = {
            **self.architecture.dims, "B": num_rows, "T": num_new, SLOTS: self.num_slots, "j": tokens.picked.shape[1]
        }  # fmt: skip
        devices = VirtualDevices(self.mesh, sizes, router=Router.of(self.architecture.numerics))
        by_token, by_slot = ("B", "T"), ("B", SLOTS)
        devices.constants = {
            "ids": (by_token, tokens.ids), "positions": (by_token, tokens.positions),
            "sequences": (by_token, tokens.sequences), "slots": (by_token, tokens.slots),
            "slot_positions": (by_slot, self.slot_positions), "slot_sequences": (by_slot, self.slot_sequences),
            "picked_tokens": (("B", "j"), tokens.picked),
        }  # fmt: skip
        return devices

    def _set_window(self, devices: VirtualDevices, window: int | None, kind: WindowKind) -> None:
        """Set which tokens a layer's attention reaches: the last ones, those of a token's chunk, or all before it."""
        for name, bounding_kind in (("window", "sliding"), ("chunk", "chunked")):
            size = window if window and kind == bounding_kind else UNLIMITED
            devices.constants[name] = ((), np.array(size))

    def _run_unit(
        self, devices: VirtualDevices, unit: InferenceUnit, path: str, inputs: Mapping[str, Shards]
    ) -> dict[str, Shards]:
        """Run a unit with its weights and caches; keep the caches that it leaves, and return its results."""
        program, specs = unit.program, unit.forward.specs
        self._set_sizes(devices, unit.name)
        if path not in self.loaded:
            self.loaded[path] = self._load(devices, unit, {name: self.weights[path][name] for name in program.weights})
        if path not in self.caches:
            empty = {name: self._empty(devices, unit, name) for name in cache_names(program)}
            self.caches[path] = self._load(devices, unit, empty)
        hidden = {(name, unit.scheme.input_spec(program.tensors[name])): shards for name, shards in inputs.items()}
        devices.live_shards = {**self.loaded[path], **self.caches[path], **hidden}
        devices.run(program, unit.steps)
        caches = cache_names(program)
        self.caches[path] = {
            (name, specs[name]): devices.live_shards[name + NEXT, specs[name + NEXT]] for name in caches
        }
        return {name: devices.live_shards[name, specs[name]] for name in program.outputs}

    def _set_sizes(self, devices: VirtualDevices, unit: str) -> None:
        """Set the sizes of the dims of a kind of layer."""
        dims = self.architecture.unit_architecture(unit).dims
        devices.sizes |= dims
        devices.true_sizes |= dims

    def _empty(self, devices: VirtualDevices, unit: InferenceUnit, name: str) -> Array:
        return np.zeros([devices.sizes[dim] for dim in unit.program.dims(name)])

    @staticmethod
    def _load(devices: VirtualDevices, unit: InferenceUnit, arrays: Mapping[str, Array]) -> LiveShards:
        for name, array in arrays.items():
            devices.scatter_array(name, unit.scheme.input_spec(unit.program.tensors[name]), array)
        keys = [(name, unit.scheme.input_spec(unit.program.tensors[name])) for name in arrays]
        return {key: devices.live_shards[key] for key in keys}


def _carried_inputs(results: Sequence[Sequence[Shards]], sources: Mapping[str, CarriedSource]) -> dict[str, Shards]:
    """Return what a layer reads beside the residual stream: results of earlier units, or a slice of one along its layers."""
    inputs = {}
    for name, source in sources.items():
        shards = results[source.unit][source.result]
        inputs[name] = [shard if source.layer_index is None else shard[:, :, source.layer_index] for shard in shards]
    return inputs


def lay_out_tokens(
    chunks: Sequence[tuple[int, Sequence[int], int]], num_rows: int, slots_of: Mapping[int, tuple[int, int]],
    num_picked: int = 1,
) -> NewTokens:  # fmt: skip
    """Return new tokens of a pass from chunks (sequence, token ids, position of the first), one behind the other in their rows.

    `slots_of` gives the row and the first slot of each sequence. The last `num_picked` tokens of each chunk are picked. Rows are
    padded to equal lengths, and to equal numbers of picked tokens by their first token.

    >>> tokens = lay_out_tokens([(0, [5, 6], 3), (1, [7], 0)], 1, {0: (0, 0), 1: (0, 8)})
    >>> tokens.ids.tolist(), tokens.positions.tolist(), tokens.slots.tolist(), tokens.picked.tolist()
    ([[5, 6, 7]], [[3, 4, 0]], [[3, 4, 8]], [[1, 2]])
    """
    rows: list[list[tuple[int, int, int, int]]] = [[] for _ in range(num_rows)]
    picked: list[list[int]] = [[] for _ in range(num_rows)]
    for sequence, ids, first in chunks:
        row, slot = slots_of[sequence]
        rows[row] += [(token, first + i, sequence, slot + first + i) for i, token in enumerate(ids)]
        picked[row] += range(len(rows[row]) - num_picked, len(rows[row]))
    length, count = max(map(len, rows)), max(map(len, picked))
    table = np.array([row + [(0, 0, -2, -1)] * (length - len(row)) for row in rows])
    tokens = np.array([row + [0] * (count - len(row)) for row in picked])
    ids, positions, sequences, slots = np.moveaxis(table, -1, 0)
    return NewTokens(ids=ids, positions=positions, sequences=sequences, slots=slots, picked=tokens)
