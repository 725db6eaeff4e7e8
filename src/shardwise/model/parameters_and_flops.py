"""Parameters and FLOPs of a model, counted on its programs; a model as it is in every payload of `--json`."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, NamedTuple

from shardwise.model.adapters import ADAPTER_OUTPUT, ALL_LINEAR, LORA_MODULES
from shardwise.model.architecture import Architecture
from shardwise.model.decoder import MTP_UNITS, borrowed_weights, build_unit_program, unit_counts
from shardwise.model.operations import (
    ATTENTION_OPERATIONS,
    RECURRENCE_OPERATIONS,
    SHARED_KEY_OPERATIONS,
    Contract,
    Operation,
    Selection,
)
from shardwise.model.optimizer_program import WeightMatrix, weight_matrices
from shardwise.model.optimizers.definition import Granularity, Optimizer
from shardwise.model.program import ModelPart, Program, Role, density
from shardwise.sharding import Spec
from shardwise.values import Flat, InputError, Payload, Polynomial, SymbolValues, multiply_symbols, sum_polynomials
from shardwise.values.symbolic import Symbol


def weight_elements(program: Program, *, without: Container[str] = ()) -> Polynomial:
    """Return the elements of a program's weights, in symbols, without those named in `without`."""
    return sum_polynomials(multiply_symbols(program.dims(name)) for name in program.weights if name not in without)


def num_params(architecture: Architecture) -> int:
    """Return the number of parameters of a model, frozen ones included; a tied embedding counts once.

    It is the sum over the weights of the derived program (`model/decoder.py`). Modules of multi-token prediction are left out,
    as in the models' names. Source: "How to Scale Your Model", Transformers: 2DF or 3DF for the MLP, 2DNH + 2DKH for
    attention, 2VD.

    >>> from shardwise.model.load import load_model
    >>> num_params(load_model("llama-3-70b"))
    70553706496
    """
    return sum(
        unit.times * unit.count_elements(unit.program.dims(name))
        for unit in _counted_units(architecture)
        for name in unit.weights
    )


class _CountedUnit(NamedTuple):
    """A unit whose weights `num_params` counts: its program, the names of these weights, how often the model has it, and the
    sizes of its dims."""

    program: Program
    weights: tuple[str, ...]
    times: int
    sizes: SymbolValues

    def count_elements(self, dims: Iterable[Symbol]) -> int:
        """Return the product of the sizes of some dims."""
        return int(multiply_symbols(dims).evaluate(self.sizes))


def _counted_units(architecture: Architecture) -> Iterator[_CountedUnit]:
    for unit, count in unit_counts(architecture).items():
        if unit not in MTP_UNITS:
            program = build_unit_program(architecture, unit)
            borrowed = borrowed_weights(architecture, unit)
            weights = tuple(name for name in program.weights if name not in borrowed)
            yield _CountedUnit(program, weights, count, _unit_sizes(architecture, unit))


def _unit_sizes(architecture: Architecture, unit: str, **sizes: float) -> SymbolValues:
    """Return the sizes of a unit's dims, and of others."""
    return SymbolValues({**architecture.unit_architecture(unit).dims, **sizes})


def params_by_part(architecture: Architecture) -> dict[ModelPart, int]:
    """Return the parameters of each part of a model; they add up to `num_params`.

    >>> from shardwise.model.load import load_model
    >>> parts = params_by_part(load_model("mixtral-8x7b"))
    >>> {part.value: f"{count / 1e9:.2f}e9" for part, count in parts.items() if count > 1e6}
    {'attention': '1.34e9', 'mlp': '45.10e9', 'vocabulary': '0.26e9'}
    """
    parts = dict.fromkeys(ModelPart, 0)
    for unit in _counted_units(architecture):
        for name in unit.weights:
            parts[_part_of_weight(unit.program, name)] += unit.times * unit.count_elements(unit.program.dims(name))
    return parts


def _part_of_weight(program: Program, weight: str) -> ModelPart:
    part = program.tensors[weight].part
    assert part is not None, f"{weight} belongs to no part of the model"
    return part


def num_trained_params(architecture: Architecture) -> int:
    """Return the parameters that the optimizer updates: all, or those of the adapters where the model has any. Modules of
    multi-token prediction are left out, as in `num_params`.

    >>> from dataclasses import replace
    >>> from shardwise.model.load import load_model
    >>> num_trained_params(replace(load_model("llama-3-8b"), lora_rank=16, lora_targets=("all-linear",)))
    41943040
    """
    return sum(
        unit.times * unit.count_elements(unit.program.dims(name))
        for unit in _counted_units(architecture)
        for name in unit.weights
        if not unit.program.tensors[name].frozen
    )


def require_adapters(architecture: Architecture) -> None:
    """Raise `InputError` where a model has none of the matrices that its adapters are for, as PEFT does.

    Targets of which a model has some are fine: the others are skipped. Source: PEFT 0.21, tuners_utils.py, `inject_adapter`.
    """
    if not architecture.lora_rank or _has_adapters(architecture):
        return
    modules = [name for name in LORA_MODULES if _has_adapters_for(architecture, name)]
    raise InputError(
        f"model {architecture.name}: found no matrix of lora_targets = {', '.join(architecture.lora_targets)}; one or more of "
        f"those that it has are required, {', '.join(modules)}, or {ALL_LINEAR}"
    )


def _has_adapters(architecture: Architecture) -> bool:
    """Return whether any layer has an adapter."""
    programs = (build_unit_program(architecture, unit) for unit in architecture.layer_counts)
    return any(name.endswith(ADAPTER_OUTPUT) for program in programs for name in program.weights)


def _has_adapters_for(architecture: Architecture, module: str) -> bool:
    """Return whether adapters of a module alone would be any; False where these are not known of the model."""
    try:
        return _has_adapters(replace(architecture, lora_targets=(module,)))
    except InputError:
        return False


def num_matrix_params(architecture: Architecture, *, tables: bool = False) -> int:
    """Return the number of trained parameters in matrices of products (`model.optimizer_program.weight_matrices`).

    >>> from shardwise.model.load import load_model
    >>> model = load_model("llama-3-8b")
    >>> num_params(model) - num_matrix_params(model) - 2 * 128256 * 4096  # embedding and head; norms are left
    266240
    """
    matrices = _trained_matrices(architecture, tables=tables)
    return sum(unit.times * unit.count_elements(matrix.dims) for matrix, unit in matrices)


def _trained_matrices(architecture: Architecture, *, tables: bool) -> Iterator[tuple[WeightMatrix, _CountedUnit]]:
    for unit in _counted_units(architecture):
        for name, matrix in weight_matrices(unit.program, tables=tables).items():
            if name in unit.weights and not unit.program.tensors[name].frozen:
                yield matrix, unit


def num_factored_state_elements(architecture: Architecture, optimizer: Optimizer) -> int:
    """Return the numbers that an optimizer keeps for rows and columns of matrices, or for pairs of them.

    >>> from shardwise.model.load import load_model
    >>> from shardwise.model.optimizers.definition import get_optimizer
    >>> model = load_model("llama-3-8b")
    >>> f"{num_factored_state_elements(model, get_optimizer('adafactor')) / num_params(model):.3%} of the parameters"
    '0.036% of the parameters'
    """
    granularities = [
        optimizer.granularity(name)
        for name in optimizer.moments
        if optimizer.granularity(name) is not Granularity.ELEMENT
    ]
    return sum(
        unit.times * unit.count_elements(matrix.dims_at(granularity, optimizer.max_preconditioned_side))
        for matrix, unit in _trained_matrices(architecture, tables=optimizer.covers_vocabulary)
        for granularity in granularities
    )


def num_mtp_params(architecture: Architecture) -> int:
    """Return the parameters of multi-token prediction in training (DeepSeek-V3: 11.5e9), which `num_params` and model cards
    leave out."""
    if not architecture.num_predict_layers:
        return 0
    program = build_unit_program(architecture, "predict")
    elements = weight_elements(program, without=program.borrowed)
    return architecture.num_predict_layers * int(elements.evaluate(_unit_sizes(architecture, "predict")))


def num_active_params(architecture: Architecture) -> int:
    """Return the parameters that a token uses: all but the experts that it is not routed to. Mixtral 8x7B has 12.9 of 46.7
    billion."""
    idle = sum(count * _num_idle_params(architecture, unit) for unit, count in architecture.layer_counts.items())
    return num_params(architecture) - idle


def _num_idle_params(architecture: Architecture, unit: str) -> int:
    """Return the parameters of the experts of one layer that a token is not routed to."""
    layer = architecture.unit_architecture(unit)
    if not layer.num_experts:
        return 0
    program, sizes = build_unit_program(architecture, unit), _unit_sizes(architecture, unit)
    experts = sum_polynomials(multiply_symbols(program.dims(name)) for name in _expert_weights(program)).evaluate(sizes)
    return (layer.num_experts - layer.experts_per_token) * (int(experts) // layer.num_experts)


def _expert_weights(program: Program) -> set[str]:
    """Return the weights that routed tokens use: matrices and biases of all experts."""

    def with_role(role: Role, names: Iterable[str]) -> set[str]:
        return {name for name in names if program.tensors[name].role is role}

    return {
        name
        for operation in program.operations
        if with_role(Role.ROUTED, operation.operands)
        for name in with_role(Role.WEIGHT, operation.operands)
    }


def program_flops(program: Program) -> Polynomial:
    """Return the FLOPs of the products and attention scans of a program on one device, in symbols of the dims."""
    return sum_polynomials(_operation_flops(program, operation) for operation in program.operations)


def _operation_flops(program: Program, operation: Operation) -> Polynomial:
    if not isinstance(
        operation, (Contract, Selection, *SHARED_KEY_OPERATIONS, *ATTENTION_OPERATIONS, *RECURRENCE_OPERATIONS)
    ):
        return Polynomial()
    specs = [Spec.of(program.dims(name)) for name in operation.inputs]
    dims = {name: tensor.dims for name, tensor in program.tensors.items()}
    routed = any(program.tensors[name].role is Role.ROUTED for name in operation.operands)
    flops = operation.flops(operation.propagate_sharding(specs, dims, lambda name: False))
    return flops * density(Role.ROUTED if routed else Role.ACTIVATION)


@lru_cache(maxsize=64)
def model_flops_per_token(architecture: Architecture, seq_len: int) -> float:
    """Return the FLOPs that one token of training needs: forward and backward without recomputation.

    6 per weight of a matrix product (4 of a frozen one, which has no gradient), and 6·T·N·H per layer for attention over the
    causal half (2 products forward, 4 backward; the scores that flash attention rebuilds in the backward pass are not
    counted). Differs: 12·L·D·T of PaLM's MFU counts the whole square of the scores; 6ND counts the embedding's rows as well.
    """
    counts = unit_counts(architecture).items()
    return sum(n * sum(unit_training_flops(architecture, name, seq_len)) for name, n in counts) / seq_len


@lru_cache(maxsize=256)
def unit_training_flops(architecture: Architecture, name: str, seq_len: int) -> tuple[float, float]:
    """Return the FLOPs of a unit over one sequence, forward and backward. A product has two in the backward pass, the
    gradients of both operands; one with a frozen weight has one."""
    program = build_unit_program(architecture, name)
    shares = architecture.unit_architecture(name).scan_shares(seq_len)
    sizes = _unit_sizes(architecture, name, B=1, T=seq_len, **shares)
    reached = _names_with_gradient(program)
    backward = sum_polynomials(
        _operation_flops(program, operation) * _num_backward_products(program, operation, reached)
        for operation in program.operations
    )
    return float(program_flops(program).evaluate(sizes)), float(backward.evaluate(sizes))


def _num_backward_products(program: Program, operation: Operation, reached: Container[str]) -> int:
    """Return the number of products in the backward pass of a product: one for each operand that is not a frozen weight, and
    none where no gradient reaches its result."""
    if operation.outputs[0] not in reached:
        return 0
    return 1 if any(program.tensors[operand].frozen for operand in operation.operands) else 2


def _names_with_gradient(program: Program) -> frozenset[str]:
    """Return the tensors that a gradient of the program's outputs reaches: all but those that only a choice reads."""
    reached = set(program.outputs)
    for operation in reversed(program.operations):
        if isinstance(operation, Selection):
            reached.difference_update(operation.outputs)
        elif not reached.isdisjoint(operation.outputs):
            reached.update(operation.inputs)
    return frozenset(reached)


def layer_training_flops(
    architecture: Architecture, seq_len: int, *, causal: bool = True
) -> tuple[dict[ModelPart, float], float]:
    """Return a layer's FLOPs over one sequence, forward and backward: products with the weights of each part, and attention's
    scores.

    It is the mean over the layers, where they differ. Scores are counted as in `model_flops_per_token`, or without `causal`
    over their whole square. Both times `num_layers`, plus the head's products, are the model's FLOPs.
    """
    products, scores = dict.fromkeys(ModelPart, 0.0), 0.0
    for name, count in architecture.layer_counts.items():
        program, share = build_unit_program(architecture, name), count / architecture.num_layers
        shares = architecture.unit_architecture(name).scan_shares(seq_len)
        shares = shares if causal else dict.fromkeys(shares, 1.0)
        sizes = _unit_sizes(architecture, name, B=1, T=seq_len, **shares)
        reached = _names_with_gradient(program)
        for operation in program.operations:
            flops = float(_operation_flops(program, operation).evaluate(sizes)) * share
            flops *= 1 + _num_backward_products(program, operation, reached)
            weights = [operand for operand in operation.operands if program.tensors[operand].role is Role.WEIGHT]
            if isinstance(
                operation, (Selection, *SHARED_KEY_OPERATIONS, *ATTENTION_OPERATIONS, *RECURRENCE_OPERATIONS)
            ):
                scores += flops
            elif flops:
                products[_part_of_weight(program, weights[0]) if weights else ModelPart.STREAMS] += flops
    return products, scores


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts(Payload):
    """Facts of a model: its architecture, its number of parameters, and the number of those that a token uses.

    >>> from shardwise.model.load import load_model
    >>> facts = ModelFacts.of(load_model("llama-3-8b"))
    >>> facts.name, facts.num_params, facts.architecture.num_layers
    ('llama-3-8b', 8030261248, 32)
    """

    name: str
    num_params: int
    num_active_params: int
    architecture: Annotated[Architecture, Flat]

    @classmethod
    def of(cls, architecture: Architecture) -> ModelFacts:
        """Return the facts of a model."""
        return cls(
            name=architecture.name, num_params=num_params(architecture),
            num_active_params=num_active_params(architecture), architecture=architecture,
        )  # fmt: skip
