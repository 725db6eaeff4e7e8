"""One training step of a unit's instruction list on virtual devices, with gradient accumulation, and the elements that
it moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.derive import CollectiveStep, Ring, ShardedUnit
from shardwise.derive.tensor_specs import state_resting_spec
from shardwise.model import Role, owning_weight
from shardwise.run.numpy.devices import MovedElements, VirtualDevices
from shardwise.run.numpy.kernels import DEFAULT_ROUTER, Router
from shardwise.sharding import CollectiveKind, Mesh, Spec
from shardwise.step import UnitInstructions
from shardwise.step.unit_instructions import lower_derived_unit
from shardwise.values import IssuePolicy, SymbolValues

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class UnitStepResult:
    """Results of one step: the loss, every gradient, every updated weight and state, and the elements moved by scope
    ("micro_batch", "step")."""

    loss: float
    gradients: Mapping[str, Array]
    updated: Mapping[str, Array]
    moved: Mapping[str, MovedElements]


def run_step(
    unit: ShardedUnit,
    mesh: Mesh,
    sizes: Mapping[str, int],
    state: Mapping[str, Array],
    batches: Sequence[Mapping[str, Array]],
    router: Router = DEFAULT_ROUTER,
) -> UnitStepResult:
    """Run the unit's forward and backward on each micro-batch, then its update.

    `state` maps each weight, and each tensor of the optimizer's state of a trained weight (`w.master`, ...), to full
    arrays; each batch maps the program's constants to full arrays. `router` says how experts are chosen.
    """
    devices, template = VirtualDevices(mesh, sizes, router=router), lower_derived_unit(unit, IssuePolicy())
    _load_state(devices, unit, state)
    moved: dict[str, MovedElements] = {"micro_batch": Counter(), "step": Counter()}
    for batch in batches:
        _run_micro_batch(devices, template, batch)
    moved["micro_batch"], devices.moved = devices.moved, Counter()
    gradients = {g: devices.gather_array(g, unit.backward.specs[g]) for g in unit.gradients.values()}
    devices.run_instructions(unit.update.program, template.passes["update"])
    moved["step"] = devices.moved
    updated = {name: devices.gather_array(name, unit.update.specs[name]) for name in unit.update.program.outputs}
    (loss,) = unit.forward.program.outputs
    return UnitStepResult(float(devices.gather_array(loss, unit.forward.specs[loss])), gradients, updated, moved)


def _load_state(devices: VirtualDevices, unit: ShardedUnit, state: Mapping[str, Array]) -> None:
    for name in unit.weights:
        devices.scatter_array(name, unit.forward.specs[name], state[name])
    program = unit.update.program
    for name in (*program.names_with_role(Role.STATE), *program.names_with_role(Role.FACTOR)):
        if name in program.inputs:
            weight = unit.forward.program.dims(owning_weight(name))
            devices.scatter_array(name, state_resting_spec(unit.scheme, weight, program.dims(name)), state[name])


def _run_micro_batch(devices: VirtualDevices, template: UnitInstructions, batch: Mapping[str, Array]) -> None:
    """Run one forward and backward; loss and gradients are added to those of earlier micro-batches."""
    unit = template.unit
    program = unit.forward.program
    (loss,) = program.outputs
    accumulated = [(loss, loss_spec(unit)), *((g, unit.backward.specs[g]) for g in unit.gradients.values())]
    earlier = {key: devices.live_shards[key] for key in accumulated if key in devices.live_shards}
    devices.constants = {name: (program.dims(name), array) for name, array in batch.items()}
    devices.run_instructions(program, template.passes["forward"])
    loss_shards = devices.live_shards[accumulated[0]]
    devices.scatter_array(f"d.{loss}", unit.forward.specs[loss], np.ones(()))
    devices.run_instructions(unit.backward.program, template.passes["backward"])
    devices.live_shards[accumulated[0]] = loss_shards
    for key, shards in earlier.items():
        devices.live_shards[key] = [a + b for a, b in zip(shards, devices.live_shards[key], strict=True)]


def loss_spec(unit: ShardedUnit) -> Spec:
    """Return the sharding of the loss before it is summed, which happens once per step."""
    (loss,) = unit.forward.program.outputs
    collectives = (step.collective for step in unit.forward.communication if step.tensor.name == loss)
    return next((collective.before for collective in collectives), unit.forward.specs[loss])


def derived_traffic(
    unit: ShardedUnit, mesh: Mesh, sizes: Mapping[str, int], num_micro_batches: int
) -> Mapping[str, MovedElements]:
    """Return the elements that all devices together receive in one step by the derivation, by scope, kind and axes.

    Traffic around a ring counts as permutes.
    """
    values = SymbolValues({**sizes, **dict(mesh.axes)})
    moved: dict[str, MovedElements] = {"micro_batch": Counter(), "step": Counter()}
    for phase, nodes in unit.phase_nodes().items():
        rings = (node for node in nodes if isinstance(node, Ring) and node.is_attention)
        in_ring = {id(step) for ring in rings for step in ring.collectives}
        for step in unit.phases()[phase]:
            if isinstance(step, CollectiveStep) and step.collective.kind is not CollectiveKind.SLICE:
                per_step = phase == "update" or not step.tensor.dims  # the loss is summed once
                scope, times = ("step", 1) if per_step else ("micro_batch", num_micro_batches)
                kind = CollectiveKind.PERMUTE if id(step) in in_ring else step.collective.kind
                received = step.collective.received_elements.evaluate(values) * mesh.num_devices
                moved[scope][kind, step.collective.axes] += round(received * times)
    return moved
