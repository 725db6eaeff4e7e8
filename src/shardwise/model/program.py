"""A model as a program: operations in order on named tensors. Counts, shardings and executions are all read from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum

from shardwise.model.operations import Contract, Map, Operation
from shardwise.values import Monomial, Polynomial, constant


class Role(StrEnum):
    """The role of a tensor; it decides the number format and whether resharding it is free."""

    WEIGHT = "weight"
    WEIGHT_GRADIENT = "weight_gradient"
    ACTIVATION = "activation"
    RESIDUAL = "residual"  # the hidden state between sub-layers: an activation that has a resting sharding of its own
    CARRIED = "carried"  # handed to layers that do not follow at once: inputs of each layer, keys and values (`carried_tensors`)
    ROUTED = "routed"  # one row for each expert and token, of which a token fills those of its experts only
    STATISTIC = "statistic"  # norms' and softmax's sums, losses: kept in fp32
    LOGITS = "logits"
    STATE = "state"  # optimizer moments and master weights
    FACTOR = "factor"  # moments that have some of a weight's dims: of each row, of each column
    MEAN = "mean"  # of what an update has for elements, over rows, columns or all of a weight: kept in fp32
    DIRECTION = "direction"  # what an update makes of a gradient before it changes the weight, as whole matrices
    CACHE = "cache"  # keys, values, latents and rows of convolutions that rest between the passes of inference
    RECURRENT_STATE = "recurrent_state"  # states of recurrences that rest between the passes of inference
    CONSTANT = "constant"  # token ids, positions: every device can make any part of it


class ModelPart(StrEnum):
    """The part of a model that a tensor belongs to. Reports add up weights by part, and recompute policies name results by it;
    nothing is priced by it."""

    ATTENTION = "attention"  # projections with their biases and adapters, sinks
    MLP = "mlp"  # likewise, and routers, experts, shared experts
    RECURRENCE = "recurrence"  # of recurrent mixers likewise, their filters, rates and steps
    STREAMS = "streams"  # weights with which several residual streams are read, written and mixed
    NORM = "norm"
    VOCABULARY = "vocabulary"  # tables of tokens and positions, the head
    PREDICTION = "prediction"  # what joins states and embeddings in multi-token prediction


@dataclass(frozen=True, slots=True)
class Tensor:
    """A named tensor of a program; `dims` are letters, whose sizes are elsewhere.

    `gradient_of` names the tensor whose complete gradient this is; a gradient from one of several uses has none. A `frozen`
    weight is not trained: it has no gradient and no optimizer state. Weights and results of a decoder's block have a `part`;
    its residual stream and gradients have none. `owner` is the unit of the model that a weight belongs to, if that is another
    one than the unit of the program: the weight rests, and its gradient is reduced, there.
    """

    name: str
    dims: tuple[str, ...]
    role: Role
    gradient_of: str = ""
    frozen: bool = False
    part: ModelPart | None = None
    owner: str = ""


def density(role: Role) -> Polynomial:
    """Return the share of a tensor's elements that exist: k of E rows for routed tokens (expected, if balanced), else all."""
    return Polynomial((Monomial(1.0, (("E", -1), ("k", 1))),)) if role is Role.ROUTED else constant(1.0)


@dataclass(frozen=True, slots=True)
class Program:
    """Operations in order, the tensors that they name, and which of these are inputs and outputs."""

    tensors: Mapping[str, Tensor]
    operations: tuple[Operation, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def dims(self, name: str) -> tuple[str, ...]:
        return self.tensors[name].dims

    def names_with_role(self, role: Role) -> tuple[str, ...]:
        """Return the names of the tensors with this role, in order of definition."""
        return tuple(name for name, tensor in self.tensors.items() if tensor.role is role)

    @property
    def weights(self) -> tuple[str, ...]:
        return self.names_with_role(Role.WEIGHT)

    @property
    def borrowed(self) -> Mapping[str, str]:
        """Weights that belong to another unit of the model, with that unit."""
        return {name: self.tensors[name].owner for name in self.weights if self.tensors[name].owner}

    def borrowing(self, weight: str, owner: str) -> Program:
        """Return the program with a weight that belongs to another unit."""
        return replace(self, tensors={**self.tensors, weight: replace(self.tensors[weight], owner=owner)})

    @property
    def trainable_inputs(self) -> tuple[str, ...]:
        """Inputs that need a gradient: trained weights, and outputs of another program."""
        tensors = (self.tensors[name] for name in self.inputs)
        return tuple(tensor.name for tensor in tensors if tensor.role is not Role.CONSTANT and not tensor.frozen)


class ProgramBuilder:
    """Collects tensors and operations; each method returns the name of what it defined.

    With `adapters_only` all weights but adapters are frozen. `position_dims` are the dims of the tokens' positions: those of all
    sequences are the same in training, and differ in inference.
    """

    def __init__(self, *, adapters_only: bool = False, position_dims: tuple[str, ...] = ("T",)) -> None:
        self.adapters_only, self.position_dims = adapters_only, position_dims
        self.tensors: dict[str, Tensor] = {}
        self.operations: list[Operation] = []
        self.inputs: list[str] = []
        self.part: ModelPart | None = None
        self.lender, self.prefixes = "", ("", "")

    @contextmanager
    def borrowing(self, lender: str, prefixes: tuple[str, str] = ("", "")) -> Iterator[None]:
        """Let weights that are used meanwhile belong to another unit; those that the program has already stay its own.

        `prefixes` are those of names in this unit, and in the other one where a program has both.
        """
        outer, self.lender, self.prefixes = (self.lender, self.prefixes), lender, prefixes
        try:
            yield
        finally:
            self.lender, self.prefixes = outer

    @contextmanager
    def in_part(self, part: ModelPart | None) -> Iterator[None]:
        """Assign tensors that are defined meanwhile to this part, unless they name another."""
        outer, self.part = self.part, part
        try:
            yield
        finally:
            self.part = outer

    def tensor(self, name: str, dims: Iterable[str], role: Role) -> str:
        self.tensors[name] = Tensor(name, tuple(dims), role, part=self.part)
        return name

    def input(self, name: str, dims: Iterable[str], role: Role) -> str:
        if name not in self.tensors:
            self.inputs.append(self.tensor(name, dims, role))
        return name

    def positions(self) -> str:
        """Return the name of the positions of the tokens, an input."""
        return self.input("positions", self.position_dims, Role.CONSTANT)

    def weight(
        self, name: str, dims: Iterable[str], *, part: ModelPart | None = None, adapter: bool = False, frozen: bool = False
    ) -> str:  # fmt: skip
        name = self.prefixes[1] + name.removeprefix(self.prefixes[0])
        owner = self.tensors[name].owner if name in self.tensors else self.lender
        self.input(name, dims, Role.WEIGHT)
        frozen = frozen or (self.adapters_only and not adapter)
        self.tensors[name] = replace(self.tensors[name], frozen=frozen, part=part or self.part, owner=owner)
        return name

    def set_role(self, name: str, role: Role) -> None:
        """Give a defined tensor another role."""
        self.tensors[name] = replace(self.tensors[name], role=role)

    def add(self, operation: Operation) -> str:
        self.operations.append(operation)
        return operation.outputs[0]

    def elementwise(
        self, function: str, inputs: Iterable[str], name: str, dims: Iterable[str], role: Role = Role.ACTIVATION,
        over: tuple[str, ...] = ("D",),
    ) -> str:  # fmt: skip
        """Add one elementwise operation; `over` are the dims that a norm is taken over."""
        reduction = "max" if function == "maximum" else "sum"
        return self.add(Map(tuple(inputs), (self.tensor(name, dims, role),), function, reduction, over))

    def contract(self, left: str, right: str, name: str, dims: Iterable[str], role: Role = Role.ACTIVATION) -> str:
        """Add one product of two operands."""
        return self.add(Contract((left, right), (self.tensor(name, dims, role),)))

    def build(self, outputs: Iterable[str]) -> Program:
        return Program(dict(self.tensors), tuple(self.operations), tuple(self.inputs), tuple(outputs))
