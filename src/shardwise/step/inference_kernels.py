"""Kernels and collectives of a unit for one pass of inference, with sizes as expressions.

Kernels are those of training's forward pass, with what engines merge: the products of one tensor with several weights (queries,
keys and values; gate and up) are one product. Symbols beside the dims: B rows of T new tokens, Z slots of the cache in each, of
which a token sees the share `span` on average, j tokens whose logits are wanted, and `touched`, the share of the experts that any
token of the pass takes: only their weights are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from shardwise.derive import CollectiveStep, ComputeStep, ProgramStep
from shardwise.derive.inference_unit import ATTENTION_DP_AXES, InferenceScheme, InferenceUnit, derive_inference_unit
from shardwise.model import Contract, Map, Program, Role, density
from shardwise.model.decoder import MTP_BLOCK_PREFIX
from shardwise.model.inference_program import EXPERT_RESULTS, EXPERT_TOKENS, ROUTER_TOKENS, cache_names
from shardwise.model.operations import SLOTS
from shardwise.model.program import ModelPart
from shardwise.sharding import Axes, CollectiveKind
from shardwise.step.collectives import merge_all_to_alls
from shardwise.step.instructions import Kernel, UnitCollective
from shardwise.step.kernel_fusion import FusionScope, fuse_steps, readers_of
from shardwise.values import ZERO, LocalDim, Polynomial, multiply_symbols, sum_polynomials

TOUCHED = "touched"  # share of the experts that any token of the pass takes
EXPERTS, ROUTER = "experts", "router"  # groups of weights beside the parts of a model
FORWARD = "forward"
CACHE_ROLES = (Role.CACHE, Role.RECURRENT_STATE)
LATENT_WEIGHTS = ("w_k_up", "w_v_up")  # by which keys and values are made of latents, or queries brought to these


@dataclass(frozen=True, slots=True)
class PassKernel:
    """A kernel, the elements of weights that it reads by group (`weight_group`), and whether its cost depends on the sequences
    that tokens belong to (`by_sequence`), and not only on how many tokens the pass has."""

    kernel: Kernel
    weights: Mapping[str, Polynomial]
    by_sequence: bool


@dataclass(frozen=True, slots=True)
class InferenceCollective:
    """A collective, and whether its payload depends on the sequences of the pass (`PassKernel`)."""

    collective: UnitCollective
    by_sequence: bool


@dataclass(frozen=True, slots=True)
class CacheTensor:
    """A tensor that rests between passes. `slot_elements` are those of one device for one slot of one sequence, or of one
    sequence where it does not grow with the tokens (`grows`); sequences are split over `sequence_axes`."""

    name: str
    role: Role
    slot_elements: Polynomial
    grows: bool
    sequence_axes: Axes


@dataclass(frozen=True, slots=True)
class InferenceKernels:
    """All of a unit that costs something in a pass. `weights` are the elements that rest on one device, by group, without those
    of other units that it reads."""

    unit: str
    kernels: tuple[PassKernel, ...]
    collectives: tuple[InferenceCollective, ...]
    weights: Mapping[str, Polynomial]
    cache: tuple[CacheTensor, ...]


@lru_cache(maxsize=256)
def inference_kernels(scheme: InferenceScheme, name: str) -> InferenceKernels:
    """Return the kernels and collectives of a unit in a pass, derived in a scheme."""
    unit = derive_inference_unit(scheme, name)
    program = unit.program
    steps = _with_adjacent_products([step for step in unit.steps if not _is_handover(step)], program)
    scope = FusionScope(program.tensors, readers_of(steps), frozenset(program.outputs))
    placed = fuse_steps(FORWARD, steps, scope, partial(_read_alike, program))
    kernels = tuple(_pass_kernel(kernel, program) for _, kernel in placed)
    collectives = tuple(InferenceCollective(c, _is_by_sequence(c)) for c in merge_all_to_alls(_unit_collectives(unit)))
    borrowed = program.borrowed
    weights = _sum_by_group(
        program, {weight: unit.forward.specs[weight].local_elements() for weight in program.weights if weight not in borrowed}
    )  # fmt: skip
    return InferenceKernels(name, kernels, collectives, weights, tuple(_cache_tensors(unit)))


def weight_group(program: Program, name: str) -> str:
    """Return the group of a weight: "experts" and "router", or its part of the model ("attention", "mlp", "norm",
    "vocabulary", "recurrence", "prediction")."""
    tensor = program.tensors[name]
    if "E" in tensor.dims:
        return EXPERTS if tensor.dims[0] == "E" and len(tensor.dims) > 1 else ROUTER
    return tensor.part.value if tensor.part else ModelPart.MLP.value


def _is_handover(step: ProgramStep) -> bool:
    """Return whether a step hands a tensor on as it is: the collective behind it reads the tensor where it lies."""
    return isinstance(step, ComputeStep) and isinstance(step.operation, Map) and step.operation.function == "handover"


def _with_adjacent_products(steps: list[ProgramStep], program: Program) -> list[ProgramStep]:
    """Return the steps with products of one tensor with several weights behind the first of them: nothing else is read."""
    ordered: list[ProgramStep] = []
    for step in steps:
        index = next((i for i, earlier in enumerate(ordered) if _read_alike(program, earlier, step)), None)
        if index is None:
            ordered.append(step)
            continue
        while index + 1 < len(ordered) and _read_alike(program, ordered[index + 1], step):
            index += 1
        ordered.insert(index + 1, step)
    return ordered


def _read_alike(program: Program, first: ProgramStep, second: ProgramStep) -> bool:
    """Return whether two steps are products of the same tensor with weights of the same group."""
    if not (isinstance(first, ComputeStep) and isinstance(second, ComputeStep)):
        return False
    if not (isinstance(first.operation, Contract) and isinstance(second.operation, Contract)):
        return False
    weights = first.operation.inputs[-1], second.operation.inputs[-1]
    if any(program.tensors[name].role is not Role.WEIGHT for name in weights):
        return False
    return first.reads[0] == second.reads[0] and weight_group(program, weights[0]) == weight_group(program, weights[1])


def _pass_kernel(kernel: Kernel, program: Program) -> PassKernel:
    """Return a kernel with the weights that it reads: of experts those that are touched."""
    sizes: dict[str, Polynomial] = {}
    for step in kernel.steps:
        for (name, _), elements in zip(step.reads, step.operation.read_elements(step.placed), strict=False):
            if program.tensors[name].role is Role.WEIGHT and elements:
                is_expert = weight_group(program, name) == EXPERTS
                sizes[name] = elements * multiply_symbols([TOUCHED]) if is_expert else elements
    weights = _sum_by_group(program, sizes)
    # Positions and sequences of tokens and slots are constants of a program; an engine's kernels have them as block tables.
    by_role: dict[Role, Polynomial] = {
        role: elements for role, elements in kernel.elements.items() if role is not Role.CONSTANT
    }
    if weights:
        by_role[Role.WEIGHT] = sum_polynomials(weights.values())
    tensors = {name: program.tensors[name] for name in (*kernel.reads, *kernel.outputs)}
    by_sequence = any(
        tensor.role in CACHE_ROLES or SLOTS in tensor.dims or name.removeprefix(MTP_BLOCK_PREFIX) in LATENT_WEIGHTS
        for name, tensor in tensors.items()
    )
    return PassKernel(replace(kernel, elements=by_role), weights, by_sequence)


def _sum_by_group(program: Program, sizes: Mapping[str, Polynomial]) -> dict[str, Polynomial]:
    groups: dict[str, Polynomial] = {}
    for name, elements in sizes.items():
        group = weight_group(program, name)
        groups[group] = groups.get(group, ZERO) + elements
    return groups


def _unit_collectives(unit: InferenceUnit) -> Iterator[UnitCollective]:
    """Yield the collectives of a pass; a slice moves nothing."""
    for position, step in enumerate(unit.steps):
        if isinstance(step, CollectiveStep) and step.collective.kind is not CollectiveKind.SLICE:
            collective, role = step.collective, step.tensor.role
            yield UnitCollective(
                unit.name, FORWARD, collective.kind, collective.axes, role, collective.payload_elements * density(role),
                (step.tensor.name,), reason=step.reason, position=position, derived=(step,),
            )  # fmt: skip


def _is_by_sequence(collective: UnitCollective) -> bool:
    """Return whether a collective moves whole sequences between devices, and not tokens to experts."""
    name = collective.tensors[0].removeprefix(MTP_BLOCK_PREFIX)
    if collective.role is Role.ROUTED or name in (EXPERT_TOKENS, ROUTER_TOKENS, EXPERT_RESULTS):
        return False
    specs: Iterable[Axes] = (spec.axes_of("B") for _, spec in collective.ends)
    return any(not set(axes) <= set(ATTENTION_DP_AXES) for axes in specs)


def _cache_tensors(unit: InferenceUnit) -> Iterator[CacheTensor]:
    for name in cache_names(unit.program):
        spec, tensor = unit.forward.specs[name], unit.program.tensors[name]
        inner = (LocalDim(dim, spec.axes_of(dim)) for dim in spec.dims if dim not in ("B", SLOTS))
        yield CacheTensor(name, tensor.role, multiply_symbols(inner), SLOTS in spec.dims, spec.axes_of("B"))
