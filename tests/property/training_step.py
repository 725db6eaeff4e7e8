"""One training step of a small decoder, sharded and unsharded, and the comparison of the two."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any
from unittest import mock

import numpy as np
from schemes import scheme_of

from shardwise.derive.sharded_program import ComputeStep
from shardwise.derive.sharded_unit import ShardedUnit, derive_unit, derive_units
from shardwise.derive.tensor_specs import handed_spec, state_resting_spec
from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.architecture import Architecture
from shardwise.model.carried_tensors import CarriedSource, carried_sources
from shardwise.model.decoder import model_program
from shardwise.model.optimizer_program import WeightMatrix, weight_matrices
from shardwise.model.optimizers.definition import DEFAULT_OPTIMIZER, Granularity, Optimizer, get_optimizer
from shardwise.model.program import Program, Role
from shardwise.run.numpy import step as step_module
from shardwise.run.numpy.devices import VirtualDevices
from shardwise.run.numpy.kernels import Router
from shardwise.run.numpy.step import UnitStepResult, derived_traffic, loss_spec, run_step
from shardwise.sharding import Mesh, Spec
from shardwise.step.instructions import Instruction
from shardwise.step.unit_instructions import lower_derived_unit
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.symbolic import SymbolValues

AXES = ("dp", "fsdp", "ep", "cp", "tp_kv", "tp_rep")
TOLERANCE = 1e-12
Change = Callable[[ShardedUnit], ShardedUnit]
Moves = Mapping[str, Mapping[Any, int]]  # by scope; elements by kind and axes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A small decoder, a layout and a batch. Sizes are multiples of what the layout splits: see `architecture`."""

    dp: int = 1
    fsdp: int = 1
    ep: int = 1
    cp: int = 1
    tp_kv: int = 1
    tp_rep: int = 1
    zero_stage: int = 0
    sequence_parallel: bool = False
    cp_variant: str = "all_gather"
    whole_experts: bool = False
    zigzag: bool = False  # the positions in the order in which each rank along cp has a piece from either end
    recompute: str = "none"
    num_micro_batches: int = 2
    mlp: str = "swiglu"
    tied: bool = False
    num_layers: int = 1
    kv_heads_per_rank: int = 1
    query_heads_per_rank: int = 1
    half_head_dim: int = 1
    width: int = 3
    hidden: int = 2
    vocab: int = 5
    seqs: int = 1
    positions: int = 2
    seed: int = 0
    weight_spread: float = 0.5  # standard deviation of weights; chains of saturated scores amplify rounding errors
    structure: tuple[tuple[str, Any], ...] = ()  # further fields of the architecture
    optimizer: str = DEFAULT_OPTIMIZER

    def optimizer_of(self, weight: str) -> Optimizer:
        """What updates a weight of the whole program."""
        return get_optimizer(self.optimizer).for_weight(is_matrix=weight in self.matrices)

    @property
    def matrices(self) -> Mapping[str, WeightMatrix]:
        """What the optimizer takes for matrices, by the weights' names."""
        return matrices_of(self.architecture, get_optimizer(self.optimizer).covers_vocabulary)

    @property
    def scheme(self) -> ShardingScheme:
        return scheme_of(
            self.architecture.structure, self.zero_stage, self.sequence_parallel, self.recompute,
            cp_variant=self.cp_variant, whole_experts=self.whole_experts, optimizer=self.optimizer,
        )  # fmt: skip

    @property
    def mesh(self) -> Mesh:
        return Mesh(tuple((axis, getattr(self, axis)) for axis in AXES))

    @property
    def architecture(self) -> Architecture:
        tp = self.tp_kv * self.tp_rep
        num_kv_heads = self.kv_heads_per_rank * self.tp_kv
        fields: dict[str, Any] = {
            "name": "small",
            "num_layers": self.num_layers,
            "d_model": self.width * self.fsdp * self.ep * self.cp,
            "d_ff": self.hidden * tp,
            "num_heads": num_kv_heads * self.query_heads_per_rank * self.tp_rep,
            "num_kv_heads": num_kv_heads,
            "head_dim": 2 * self.half_head_dim,
            "vocab_size": self.vocab * tp,
            "mlp": self.mlp,
            "tied_embeddings": self.tied,
        }
        return Architecture(**{**fields, **dict(self.structure)})

    @property
    def router(self) -> Router:
        return Router.of(self.architecture.numerics)

    @property
    def sizes(self) -> dict[str, int]:
        ranks = self.cp * (self.tp_kv * self.tp_rep if self.sequence_parallel else 1)
        return {**self.architecture.dims, "B": self.seqs * self.dp * self.fsdp * self.ep, "T": self.positions * ranks}

    def sizes_of(self, unit: str) -> dict[str, int]:
        """Sizes in a unit: a kind of layer may have others than the base layer."""
        return {**self.sizes, **self.architecture.unit_architecture(unit).dims}

    def sizes_of_weight(self, name: str) -> dict[str, int]:
        """Sizes in the unit of a weight of the whole program, whose name begins with the number of its layer."""
        layer, dot, _ = name.partition(".")
        outer = "embedding" if name.startswith("embedding") else "head"
        return self.sizes_of(self.architecture.layer_units[int(layer)] if dot and layer.isdecimal() else outer)

    def inputs(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """Random weights and optimizer states, and the micro-batches of one step."""
        rng = np.random.default_rng(self.seed)
        program, state = model_program(self.architecture), {}
        for name in program.weights:
            sizes = self.sizes_of_weight(name)
            shape = [sizes[dim] for dim in program.dims(name)]
            if ".lambda_" in name:  # exponents, which are small: else a factor of e^8 cancels in the norm behind it
                state[name] = rng.normal(size=shape) * 0.1
            else:
                state[name] = rng.normal(size=shape) * self.weight_spread + (1.0 if len(shape) == 1 else 0.0)
            state[f"{name}.master"] = state[name] + rng.normal(size=shape) * 1e-3
            for moment, update in self.optimizer_of(name).moments.items():
                dims, side = program.dims(name), self.optimizer_of(name).max_preconditioned_side
                if update.granularity is not Granularity.ELEMENT:
                    dims = self.matrices[name].dims_at(update.granularity, side)
                shape = [SymbolValues(sizes)[dim] for dim in dims]
                state[f"{name}.{moment}"] = (
                    rng.random(size=shape) if update.is_second_moment else rng.normal(size=shape)
                )
                if update.granularity in (Granularity.ROW_PAIR, Granularity.COLUMN_PAIR):
                    state[f"{name}.{moment}"] = definite(state[f"{name}.{moment}"])
        return state, [self.batch(rng, self.sizes) for _ in range(self.num_micro_batches)]

    def batch(self, rng: np.random.Generator, sizes: Mapping[str, int]) -> dict[str, Any]:
        """One micro-batch: for the model and for each module of multi-token prediction."""
        tokens = (sizes["B"], sizes["T"])
        arrays: dict[str, Any] = {"positions": np.arange(sizes["T"])}
        for prefix in ("", *(f"predict{i}." for i in range(self.architecture.num_predict_layers))):
            arrays[f"{prefix}ids"] = self.ids(rng, tokens, sizes["V"])
            arrays[f"{prefix}targets"] = rng.integers(sizes["V"], size=tokens)
            arrays[f"{prefix}loss_scale"] = np.array(1.0 / (tokens[0] * tokens[1] * self.num_micro_batches))
        batch = {name: array[..., self.order(sizes["T"])] if array.ndim else array for name, array in arrays.items()}
        for layer in self.architecture.layer_architectures.values():
            if layer.recurrence is not None and layer.recurrence.kind == "lightning":
                heads = layer.recurrence.dims["L"]
                batch["mixer.fixed_decay"] = -0.1 * np.broadcast_to(np.arange(1.0, heads + 1.0), (*tokens, heads))
        if any(layer.hashed_experts for layer in self.architecture.layer_architectures.values()):
            choices = rng.permuted(np.broadcast_to(np.arange(sizes["E"]), (*tokens, sizes["E"])), axis=-1)
            batch["hashed_experts"] = choices[..., : sizes["k"]]
        return batch

    def order(self, length: int) -> Any:
        """Positions of the sequence as the ranks along cp have them."""
        if not self.zigzag:
            return np.arange(length)
        pieces = np.arange(length).reshape(2 * self.cp, -1)
        return np.concatenate([pieces[[rank, 2 * self.cp - 1 - rank]].ravel() for rank in range(self.cp)])

    def ids(self, rng: np.random.Generator, shape: tuple[int, int], vocab: int) -> Any:
        """Random tokens, the first two of a sequence different.

        Attention over equal values does not depend on its scores; the keys' gradient would be zero but for rounding.
        """
        ids = rng.integers(vocab, size=shape)
        ids[:, 1] = (ids[:, 0] + 1) % vocab
        return ids


@lru_cache(maxsize=64)
def matrices_of(architecture: Architecture, tables: bool) -> Mapping[str, WeightMatrix]:
    return weight_matrices(model_program(architecture), tables=tables)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one step gave, by the weights' names in the whole program; what moved, and what was derived to move."""

    loss: float
    gradients: Mapping[str, Any]
    updated: Mapping[str, Any]
    moved: Moves
    derived: Moves


class StrictDevices(VirtualDevices):
    """Virtual devices that forget between programs what a real step would not have, and check that copies agree.

    The backward program finds the resting weights and the saved tensors only, the update the gradients and states only:
    a weight that was gathered in the forward pass has to be gathered again, unless the unit keeps it, and what was not saved
    has to be rebuilt.
    """

    def __init__(
        self,
        mesh: Mesh,
        sizes: Mapping[str, int],
        scheme: ShardingScheme | None = None,
        *,
        unit: ShardedUnit,
        router: Router,
    ) -> None:
        super().__init__(mesh, sizes, router=router)
        forward = unit.forward
        output = forward.program.outputs[0]
        self.state = (
            *unit.update.program.names_with_role(Role.STATE),
            *unit.update.program.names_with_role(Role.FACTOR),
        )
        self.lent_gradients: dict[
            str, list[Any]
        ] = {}  # gradients that other units made of this one's weights, before they are reduced
        weights = {(name, forward.specs[name]) for name in forward.program.weights}
        hidden = {
            (name, forward.specs[name])
            for name in forward.program.inputs
            if forward.program.tensors[name].role in (Role.RESIDUAL, Role.CARRIED)
        }
        handed_on = {(name, forward.specs[name]) for name in forward.program.outputs[1:]}
        losses = set() if forward.program.dims(output) else {(output, forward.specs[output])}
        summed = {(output, loss_spec(unit))} if losses else set()
        self.known = {
            id(forward.program): weights | hidden,
            id(unit.backward.program): weights
            | losses
            | {(f"d.{name}", forward.specs[name]) for name in forward.program.outputs}
            | {*unit.saved.items(), *unit.gathered_weights.items(), *handed_on},
            id(unit.update.program): summed | {(name, unit.backward.specs[name]) for name in unit.gradients.values()},
        }

    def run_instructions(self, program: Program, instructions: Sequence[Instruction]) -> None:
        known = self.known[id(program)]
        self.live_shards = {
            (name, spec): shards
            for (name, spec), shards in self.live_shards.items()
            if (name, spec) in known or name in self.state
        }
        super().run_instructions(program, instructions)

    def compute(self, program: Program, step: ComputeStep) -> None:
        super().compute(program, step)
        for name, spec in step.writes:
            lent_gradient = self.lent_gradients.pop(name, None)
            if lent_gradient is not None:
                shards = self.live_shards[name, spec]
                self.live_shards[name, spec] = [a + b for a, b in zip(shards, lent_gradient, strict=True)]

    def gather_array(self, name: str, spec: Spec) -> Any:
        owned = (*spec.sharded_axes, *spec.partial)
        first: dict[tuple[int, ...], Any] = {}
        for coordinate, shard in zip(self.coordinates, self.live_shards[name, spec], strict=True):
            same = first.setdefault(tuple(coordinate[axis] for axis in owned), shard)
            assert error(shard, same) <= TOLERANCE, f"{name}: devices that should hold the same shard differ"
        return super().gather_array(name, spec)


def error(actual: Any, expected: Any) -> float:
    """Norm of the difference, relative to the expected norm."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.shape == expected.shape
    return float(np.linalg.norm(actual - expected) / max(float(np.linalg.norm(expected)), 1e-300))


def definite(flat: Any) -> Any:
    """Squares [..., n²] as an average of products of gradients has them: symmetric, without negative eigenvalues."""
    side = math.isqrt(flat.shape[-1])
    squares = flat.reshape(*flat.shape[:-1], side, side)
    return (squares @ squares.swapaxes(-1, -2)).reshape(flat.shape)


@lru_cache(maxsize=64)
def run_unsharded(case: Case) -> Outcome:
    """The same decoder and batch on one device, with nothing sharded and nothing recomputed."""
    scheme = scheme_of(case.architecture.structure, optimizer=case.optimizer)
    unit = derive_unit("whole", model_program(case.architecture), scheme)
    state, batches = case.inputs()
    single_device = Mesh(tuple((axis, 1) for axis in AXES))
    outcome = _outcome(case, unit, run_step(unit, single_device, case.sizes, state, batches, case.router))
    assert outcome.moved == {"micro_batch": {}, "step": {}}
    return outcome


def whole(case: Case, change: Change = lambda unit: unit) -> Outcome:
    """The whole model as one derived unit on virtual devices; `change` may corrupt the derivation before it runs."""
    unit = change(derive_unit("whole", model_program(case.architecture), case.scheme))
    state, batches = case.inputs()
    with mock.patch.object(step_module, "VirtualDevices", partial(StrictDevices, unit=unit)):
        return _outcome(case, unit, run_step(unit, case.mesh, case.sizes, state, batches, case.router))


def _outcome(case: Case, unit: ShardedUnit, result: UnitStepResult) -> Outcome:
    gradients = {weight: result.gradients[name] for weight, name in unit.gradients.items()}
    derived = derived_traffic(unit, case.mesh, case.sizes, case.num_micro_batches)
    return Outcome(result.loss, gradients, result.updated, nonzero(result.moved), nonzero(derived))


def run_units(case: Case, change: Change = lambda unit: unit) -> Outcome:
    """Embedding, blocks and head as the units that costs are read off, each handing its result to the next."""
    return _Chain(case, case.mesh, case.scheme, change).run()


@lru_cache(maxsize=64)
def chained_on_one_device(case: Case) -> Outcome:
    """The same model and batch, unit by unit, with nothing sharded and nothing recomputed: layers may differ in sizes."""
    scheme = scheme_of(case.architecture.structure, optimizer=case.optimizer)
    return _Chain(case, Mesh(tuple((axis, 1) for axis in AXES)), scheme).run()


class _Chain:
    def __init__(self, case: Case, mesh: Mesh, scheme: ShardingScheme, change: Change = lambda unit: unit) -> None:
        assert not case.tied, "tied weights are one tensor of two units"
        self.case, self.mesh, self.scheme = case, mesh, scheme
        units = {name: change(unit) for name, unit in derive_units(scheme).items()}
        self.lists = {id(unit): lower_derived_unit(unit, IssuePolicy()).passes for unit in units.values()}
        layers = case.architecture.layer_units
        names = [("embedding", ""), *((name, f"{i}.") for i, name in enumerate(layers)), ("head", "")]
        self.links = [
            (units[name], prefix, StrictDevices(mesh, case.sizes_of(name), unit=units[name], router=case.router))
            for name, prefix in names
        ]
        self.reads: list[Mapping[str, CarriedSource]] = [{}, *carried_sources(case.architecture), {}]
        kinds = [name for name, _ in names]
        self.owners = [  # of each unit, the positions of the units that own the weights that it borrows
            {weight: kinds.index(owner) for weight, owner in units[name].forward.program.borrowed.items()}
            for name in kinds
        ]

    def run(self) -> Outcome:
        state, batches = self.case.inputs()
        for unit, prefix, devices in self.links:
            for name, dims in unit.weights.items():
                devices.scatter_array(name, unit.forward.specs[name], state[prefix + name])
                for part in self.case.optimizer_of(prefix + name).state if name in unit.trained else ():
                    state_dims = unit.update.program.dims(f"{name}.{part}")
                    devices.scatter_array(
                        f"{name}.{part}",
                        state_resting_spec(self.scheme, dims, state_dims),
                        state[f"{prefix}{name}.{part}"],
                    )
        for (unit, _, devices), owners in zip(self.links, self.owners, strict=True):
            for name, position in owners.items():
                key = name, unit.forward.specs[name]
                devices.live_shards[key] = self.links[position][2].live_shards[key]
        for batch in batches:
            self.micro_batch(batch)
        moved = {"micro_batch": self.take_moved()}
        gradients = {
            prefix + weight: devices.gather_array(name, unit.backward.specs[name])
            for unit, prefix, devices in self.links
            for weight, name in unit.gradients.items()
        }
        updated = {}
        for unit, prefix, devices in self.links:
            devices.run_instructions(unit.update.program, self.lists[id(unit)]["update"])
            updated |= {
                prefix + name: devices.gather_array(name, unit.update.specs[name])
                for name in unit.update.program.outputs
            }
        moved["step"] = self.take_moved()
        head, _, devices = self.links[-1]
        loss = float(devices.gather_array("loss", head.forward.specs["loss"]))
        return Outcome(loss, gradients, updated, nonzero(moved), nonzero(self.derived()))

    def micro_batch(self, batch: Mapping[str, Any]) -> None:
        head, _, last = self.links[-1]
        loss = "loss", loss_spec(head)
        earlier_loss = last.live_shards.get(loss)
        earlier_gradients = [
            {g: d.live_shards.get((g, u.backward.specs[g])) for g in u.gradients.values()} for u, _, d in self.links
        ]
        x = None
        for position, (unit, _, devices) in enumerate(self.links):
            program = unit.forward.program
            devices.constants = {name: (program.dims(name), a) for name, a in batch.items() if name in program.inputs}
            if x is not None:
                devices.live_shards["x", unit.forward.specs["x"]] = x
            for name, source in self.reads[position].items():
                _, _, source_devices = self.links[source.unit]
                shards = source_devices.live_shards[self.carried_key(source)]
                devices.live_shards[name, unit.forward.specs[name]] = [
                    shard if source.layer_index is None else shard[:, :, source.layer_index] for shard in shards
                ]
            devices.run_instructions(program, self.lists[id(unit)]["forward"])
            output = program.outputs[0]
            x = devices.live_shards[loss if unit is head else (output, unit.forward.specs[output])]
        own_loss = last.live_shards[loss]
        dx = [np.ones(()) for _ in range(self.mesh.num_devices)]
        carried: dict[tuple[int, str], list[Any]] = {}  # gradients of what a unit hands on, summed over its readers
        for position, (unit, _, devices) in reversed([*enumerate(self.links)]):
            output, *handed_on = unit.forward.program.outputs
            devices.live_shards[f"d.{output}", unit.forward.specs[output]] = dx
            for name in handed_on:
                key = name, unit.forward.specs[name]
                zeros = [np.zeros_like(shard) for shard in devices.live_shards[key]]
                devices.live_shards[f"d.{name}", key[1]] = carried.pop((position, name), zeros)
            devices.run_instructions(unit.backward.program, self.lists[id(unit)]["backward"])
            for name in set(unit.backward.program.outputs) - set(unit.gradients.values()):
                primal = name.removeprefix("d.").partition("#")[0]
                if primal in self.owners[position]:
                    self.lend_gradient(position, name, primal)
                    continue
                assert unit.backward.specs[name] == handed_spec(self.scheme, unit.forward.program.tensors[primal])
                shards = devices.live_shards[name, unit.backward.specs[name]]
                if primal == "x":
                    dx = shards
                else:
                    self.add_carried(carried, self.reads[position][primal], shards)
        for (unit, _, devices), earlier in zip(self.links, earlier_gradients, strict=True):
            for name, shards in earlier.items():
                key = name, unit.backward.specs[name]
                if shards is not None:
                    devices.live_shards[key] = [a + b for a, b in zip(shards, devices.live_shards[key], strict=True)]
        last.live_shards[loss] = (
            own_loss if earlier_loss is None else [a + b for a, b in zip(earlier_loss, own_loss, strict=True)]
        )

    def lend_gradient(self, position: int, gradient: str, weight: str) -> None:
        """Hand the gradient of a borrowed weight, a partial sum, to the unit that owns the weight and reduces both."""
        unit, _, devices = self.links[position]
        shards = devices.live_shards[gradient, unit.backward.specs[gradient]]
        owner, _, owner_devices = self.links[self.owners[position][weight]]
        earlier = owner_devices.lent_gradients.get(owner.gradients[weight])
        owner_devices.lent_gradients[owner.gradients[weight]] = (
            shards if earlier is None else [a + b for a, b in zip(earlier, shards, strict=True)]
        )

    def carried_key(self, source: CarriedSource) -> tuple[str, Spec]:
        """The name and the spec of a carried tensor in the unit that computes it."""
        forward = self.links[source.unit][0].forward
        name = forward.program.outputs[source.result]
        return name, forward.specs[name]

    def add_carried(
        self, carried: dict[tuple[int, str], list[Any]], source: CarriedSource, shards: Sequence[Any]
    ) -> None:
        """Add a reader's gradient to that of a carried tensor, at its index along the layers if it read one."""
        key = self.carried_key(source)
        like = self.links[source.unit][2].live_shards[key]
        total = carried.setdefault((source.unit, key[0]), [np.zeros_like(shard) for shard in like])
        for whole, part in zip(total, shards, strict=True):
            (whole if source.layer_index is None else whole[:, :, source.layer_index])[...] += part

    def take_moved(self) -> Counter[Any]:
        taken: Counter[Any] = Counter()
        for _, _, devices in self.links:
            taken.update(devices.moved)
            devices.moved = Counter()
        return taken

    def derived(self) -> dict[str, Counter[Any]]:
        total: dict[str, Counter[Any]] = {"micro_batch": Counter(), "step": Counter()}
        for unit, _, _ in self.links:
            sizes = self.case.sizes_of(unit.name)
            for scope, moves in derived_traffic(unit, self.mesh, sizes, self.case.num_micro_batches).items():
                total[scope].update(moves)
        return total


def worst_error(case: Case, outcome: Outcome, reference: Outcome | None = None) -> tuple[float, str]:
    """The largest relative error of the loss, a gradient, an updated weight or a state, and whose it is."""
    reference = reference or run_unsharded(case)
    program = model_program(case.architecture)
    trained = set(program.weights) & set(program.trainable_inputs)
    assert set(outcome.gradients) == set(reference.gradients) == trained
    assert set(outcome.updated) == set(reference.updated)
    assert len(outcome.updated) == sum(1 + len(case.optimizer_of(name).state) for name in trained)
    errors = {"loss": error(outcome.loss, reference.loss)}
    errors |= {f"gradient of {name}": error(g, reference.gradients[name]) for name, g in outcome.gradients.items()}
    errors |= {name: error(array, reference.updated[name]) for name, array in outcome.updated.items()}
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else float("inf"))
    return errors[worst], worst


def nonzero(moved: Mapping[str, Mapping[Any, int]]) -> Moves:
    """Without the collectives of a group of one device."""
    return {scope: {key: count for key, count in counts.items() if count} for scope, counts in moved.items()}
