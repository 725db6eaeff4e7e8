"""One training step of a derived program on virtual devices, with accumulation, and what it moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.derive.derivation import Unit
from shardwise.derive.shardings import optimizer_rest
from shardwise.derive.walk import Communicate
from shardwise.engine.numpy.ring import rings_of
from shardwise.engine.numpy.virtual import Moved, VirtualDevices
from shardwise.layout.family import Family
from shardwise.model.update import STATE
from shardwise.sharding.collective import Kind
from shardwise.sharding.mesh import Mesh
from shardwise.symbolic import Values

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one step gave: the loss, every gradient, every updated weight and state, and the elements moved by phase."""

    loss: float
    gradients: Mapping[str, Array]
    updated: Mapping[str, Array]
    moved: Mapping[str, Moved]


def run_step(
    unit: Unit,
    family: Family,
    mesh: Mesh,
    sizes: Mapping[str, int],
    state: Mapping[str, Array],
    batches: Sequence[Mapping[str, Array]],
) -> StepResult:
    """Run the unit's forward and backward on each micro-batch, then its update.

    `state` maps each weight, and the optimizer states `w.master`, `w.first`, `w.second` of one that is trained, to whole
    arrays; each batch maps the program's constants to whole arrays.
    """
    devices = VirtualDevices(mesh, sizes, family)
    _load(devices, unit, family, state)
    moved: dict[str, Moved] = {"micro_batch": Counter(), "step": Counter()}
    loss = sum(_micro_batch(devices, unit, batch) for batch in batches)
    moved["micro_batch"], devices.moved = devices.moved, Counter()
    gradients = {g: devices.get(g, unit.backward.specs[g]) for g in unit.gradients.values()}
    devices.run(unit.update.program, unit.update.steps)
    moved["step"] = devices.moved
    updated = {name: devices.get(name, unit.update.specs[name]) for name in unit.update.program.outputs}
    return StepResult(float(loss), gradients, updated, moved)


def _load(devices: VirtualDevices, unit: Unit, family: Family, state: Mapping[str, Array]) -> None:
    for name, dims in unit.weights.items():
        devices.put(name, unit.forward.specs[name], state[name])
        for part in STATE if name in unit.trained else ():
            devices.put(f"{name}.{part}", optimizer_rest(family, dims), state[f"{name}.{part}"])


def _micro_batch(devices: VirtualDevices, unit: Unit, batch: Mapping[str, Array]) -> float:
    """One forward and backward; gradients are added to those of earlier micro-batches where they rest."""
    held = {g: devices.held.get((g, unit.backward.specs[g])) for g in unit.gradients.values()}
    program = unit.forward.program
    devices.constants = {name: (program.dims(name), array) for name, array in batch.items()}
    devices.run(program, unit.forward.steps)
    (loss,) = program.outputs
    devices.put(f"d.{loss}", unit.forward.specs[loss], np.ones(()))
    devices.run(unit.backward.program, unit.backward.steps)
    for name, earlier in held.items():
        if earlier is not None:
            key = name, unit.backward.specs[name]
            devices.held[key] = [a + b for a, b in zip(earlier, devices.held[key], strict=True)]
    return float(devices.get(loss, unit.forward.specs[loss]))


def derived_moves(unit: Unit, mesh: Mesh, sizes: Mapping[str, int], num_micro_batches: int) -> Mapping[str, Moved]:
    """What the derivation says that all devices together receive in one step, by scope, kind and axes.

    What goes around a ring counts as permutes.
    """
    values = Values({**sizes, **dict(mesh.axes)})
    moved: dict[str, Moved] = {"micro_batch": Counter(), "step": Counter()}
    for phase, steps in unit.phases().items():
        scope, times = ("step", 1) if phase == "update" else ("micro_batch", num_micro_batches)
        around = {moved for ring in rings_of(steps, unit.family).values() for moved in ring}
        for position, step in enumerate(steps):
            if isinstance(step, Communicate) and step.collective.kind is not Kind.SLICE:
                kind = Kind.PERMUTE if position in around else step.collective.kind
                received = step.collective.received_elements.evaluate(values) * mesh.num_devices
                moved[scope][kind, step.collective.axes] += round(received * times)
    return moved
