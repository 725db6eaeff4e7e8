"""The kinds of operation: contract, map (elementwise, with or without a reduction), lookup, scan, carry.

Each kind knows three things: which shardings it needs and gives (`place`), its transpose (`gradients`), and what it
costs (`flops`; bytes are those of its operands). Layouts, costs and executors only ask these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwise.model.functions import FUNCTIONS, LINEAR_IN_FIRST
from shardwise.sharding.einsum import contract
from shardwise.sharding.spec import Spec
from shardwise.symbolic import Local, Polynomial, product, total

Dims = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Placed:
    """Shardings of the operands at the operation, natural shardings of the results, and why each operand moves."""

    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    reasons: tuple[str, ...] = ()  # one for each operand, empty where it stays


@dataclass(frozen=True, slots=True)
class Operation(ABC):
    """Reads `inputs` and defines `outputs`, by name."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    @abstractmethod
    def kind(self) -> str:
        """One of contract, map, lookup, scatter, scan, carry."""

    @property
    def operands(self) -> tuple[str, ...]:
        """The inputs whose values are read; an input behind them gives its sharding or shape only."""
        return self.inputs

    @abstractmethod
    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        """Shardings of operands and results when the operands lie as in `specs`.

        `fixed(name)` says which operands may not move; `goal` is the sharding that the result is wanted in, if known.
        """

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        """For each input that a gradient flows into, the operation that gives it from the outputs' gradients.

        The result's name is left open: the operation's `outputs` are `("?",)` or, for several at once, `("?0", ...)`.
        """
        return []

    def flops(self, placed: Placed) -> Polynomial:
        """Floating-point operations on one device."""
        return Polynomial()


@dataclass(frozen=True, slots=True)
class Contract(Operation):
    """`result = left * right`, summed over the dims that the result lacks (an einsum of two operands)."""

    @property
    def kind(self) -> str:
        return "contract"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        left, right = self.inputs
        keep = "left" if fixed(left) else "right" if fixed(right) else None
        case = contract(specs[0], specs[1], dims[self.outputs[0]], fixed=keep, goal=goal)
        reasons = tuple("; ".join(why for s, why in case.moves if s == side) for side in ("left", "right"))
        return Placed((case.left, case.right), (case.result,), reasons)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        left, right = self.inputs
        dy = cotangents[self.outputs[0]]
        return [(left, Contract((dy, right), ("?",))), (right, Contract((left, dy), ("?",)))]

    def flops(self, placed: Placed) -> Polynomial:
        """2 per element of the index space; 1 where nothing is summed (an elementwise or outer product)."""
        sizes = {Local(d, a) for spec in placed.inputs for d, a in zip(spec.dims, spec.axes, strict=True)}
        summed = {size.dim for size in sizes} - set(placed.outputs[0].dims)
        return product(sizes, 2.0 if summed else 1.0)


@dataclass(frozen=True, slots=True)
class Map(Operation):
    """`result = function(*inputs)` elementwise over the union of their dims, reduced over the dims the result lacks.

    `over` are the dims that a norm is taken over: their size is all that the function knows of them.
    """

    function: str = "identity"
    reduction: str = "sum"
    over: Dims = ("D",)

    @property
    def kind(self) -> str:
        return "map"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        if len(specs) == 1 or self._passes_partial(specs, fixed):
            anchor = specs[0]
        else:
            whole = [s for s, name in zip(specs, self.inputs, strict=True) if not s.partial and not fixed(name)]
            anchor = max(whole or specs, key=lambda spec: len(spec.dims))
        linear = self._linear()
        aligned = []
        for position, spec in enumerate(specs):
            partial = spec.partial if position in linear and spec is anchor else ()
            axes = {d: anchor.axes_of(d) if d in anchor.dims else spec.axes_of(d) for d in spec.dims}
            aligned.append(Spec.of(spec.dims, axes, partial))
        return Placed(tuple(aligned), (self._result(aligned, dims[self.outputs[0]]),))

    def _linear(self) -> tuple[int, ...]:
        if self.function in LINEAR_IN_FIRST:
            return (0,)
        return FUNCTIONS[self.function].linear if self.function in FUNCTIONS else ()

    def _passes_partial(self, specs: Sequence[Spec], fixed: Callable[[str], bool]) -> bool:
        return 0 in self._linear() and bool(specs[0].partial)

    def _result(self, aligned: Sequence[Spec], dims: Dims) -> Spec:
        split: dict[str, tuple[str, ...]] = {}
        for spec in aligned:
            split.update({d: a for d, a in zip(spec.dims, spec.axes, strict=True) if a})
        partial = {axis for d, axes in split.items() if d not in dims for axis in axes}
        partial |= {axis for spec in aligned for axis in spec.partial}
        return Spec.of(dims, {d: a for d, a in split.items() if d in dims}).with_partial(partial, self.reduction)

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        dy = cotangents[self.outputs[0]]
        found: list[tuple[str, Operation]] = []
        for name, gradient in zip(self.inputs, FUNCTIONS[self.function].gradients, strict=True):
            if gradient is not None:
                operands = tuple(self.inputs[i] for i in gradient.operands)
                found.append((name, Map((dy, *operands), ("?",), gradient.function, over=self.over)))
        return found

    def flops(self, placed: Placed) -> Polynomial:
        sizes = {Local(d, a) for spec in placed.inputs for d, a in zip(spec.dims, spec.axes, strict=True)}
        known = FUNCTIONS.get(self.function)
        return product(sizes, known.flops_per_element if known else 1.0)


@dataclass(frozen=True, slots=True)
class Accumulate(Operation):
    """The sum of the gradients from all uses of one tensor. The last input gives the sharding to meet in only.

    Gradients that lie alike are added as they are, partial or not; others are brought to the tensor's own sharding.
    """

    @property
    def kind(self) -> str:
        return "map"

    @property
    def operands(self) -> tuple[str, ...]:
        return self.inputs[:-1]

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        *parts, like = specs
        meet = parts[0] if all(part == parts[0] for part in parts) else like.with_partial(())
        return Placed((*(meet for _ in parts), like), (meet,))

    def flops(self, placed: Placed) -> Polynomial:
        return placed.outputs[0].local_elements() * float(len(placed.inputs) - 2)


@dataclass(frozen=True, slots=True)
class Join(Operation):
    """The operands one after the other along a dim of the result's own; `parts` are their own dims, in order.

    An operand that lacks another dim of the result is repeated along it (a key's rotary part is one for all heads).
    """

    parts: Dims = ()

    @property
    def kind(self) -> str:
        return "map"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        fullest = max(specs, key=lambda spec: len(spec.dims))
        rows = {d: fullest.axes_of(d) for d in fullest.dims if d not in self.parts}
        aligned = tuple(Spec.of(s.dims, {d: a for d, a in rows.items() if d in s.dims}) for s in specs)
        return Placed(aligned, (Spec.of(dims[self.outputs[0]], rows),))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (whole,) = self.outputs
        joined = next(d for d in dims[whole] if all(d not in dims[name] for name in self.inputs))
        return [
            (name, Part((cotangents[whole], name), ("?",), self.parts, joined, position))
            for position, name in enumerate(self.inputs)
        ]


@dataclass(frozen=True, slots=True)
class Part(Operation):
    """The transpose of a join: one operand's part along `joined`, summed over the dims that the operand lacks.

    The second input gives the shape only.
    """

    parts: Dims
    joined: str
    position: int

    @property
    def kind(self) -> str:
        return "map"

    @property
    def operands(self) -> tuple[str, ...]:
        return self.inputs[:-1]

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        dy, like = specs
        summed = {a for d in dy.dims if d not in (*like.dims, self.joined) for a in dy.axes_of(d)}
        rows = {d: dy.axes_of(d) for d in like.dims if d in dy.dims}
        return Placed((dy, like), (Spec.of(like.dims, rows, summed | set(dy.partial)),))


@dataclass(frozen=True, slots=True)
class Lookup(Operation):
    """`result[...] = table[index[...]]` along `dim`: an embedding, or the target's logit.

    Where `dim` is split, each device answers for its own rows and gives zero for the others: a partial sum.
    """

    dim: str = "V"

    @property
    def kind(self) -> str:
        return "lookup"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        table, index = specs
        own = table.axes_of(self.dim)
        shared = {d: table.axes_of(d) if d in table.dims else index.without(own).axes_of(d) for d in index.dims}
        index = Spec.of(index.dims, shared)
        out = dims[self.outputs[0]]
        split = {d: index.axes_of(d) if d in index.dims else table.axes_of(d) for d in out}
        return Placed((table, index), (Spec.of(out, split, own),))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        table, index = self.inputs
        return [(table, Scatter((cotangents[self.outputs[0]], index, table), ("?",), self.dim))]


@dataclass(frozen=True, slots=True)
class Scatter(Operation):
    """The transpose of a lookup: adds each row of `dy` at its index. The third input gives the shape and sharding only."""

    dim: str = "V"

    @property
    def kind(self) -> str:
        return "scatter"

    @property
    def operands(self) -> tuple[str, ...]:
        return self.inputs[:-1]

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        dy, index, table = specs
        own = table.axes_of(self.dim)
        dy = dy.without(own)
        index = Spec.of(index.dims, {d: dy.axes_of(d) for d in index.dims})
        summed = {a for d in dy.dims if d not in table.dims for a in dy.axes_of(d)}
        split = {d: own if d == self.dim else dy.axes_of(d) for d in table.dims}
        out = Spec.of(table.dims, split, summed | set(dy.partial))
        return Placed((dy, index, table), (out,))


@dataclass(frozen=True, slots=True)
class Scan(Operation):
    """Causal softmax attention as an online-softmax scan over the keys: (q, k, v, positions of the queries, and of the
    keys) -> (output, log-sum-exp).

    Shapes: q[B,T,K,G,H], k[B,T,K,H], v[B,T,K,U] (U is H but for latent attention), positions[T]. Keys and values are
    needed whole along T where q is split (all-gather context parallelism); heads and batch are independent.
    A sixth input, sinks[K,G], adds a logit to each head's softmax that no value goes with (OpenAI 2025, gpt-oss).
    Source: Dao et al. 2022; S1, "ring attention".
    """

    sequence: str = "T"
    heads: Dims = ("K", "G", "H")

    @property
    def kind(self) -> str:
        return "scan"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        q, k, v, positions, _, *sinks = specs
        q = Spec.of(q.dims, {d: q.axes_of(d) for d in q.dims})
        keys = {d: () if d == self.sequence else q.axes_of(d) for d in k.dims[:-1]}
        own = Spec.of(positions.dims, {self.sequence: q.axes_of(self.sequence)})
        heads = (Spec.of(sink.dims, {d: q.axes_of(d) for d in sink.dims}) for sink in sinks)
        used = (q, Spec.of(k.dims, keys), Spec.of(v.dims, keys), own, Spec.of(positions.dims), *heads)
        rows = {d: q.axes_of(d) for d in q.dims[:-1]}
        return Placed(used, (Spec.of((*q.dims[:-1], v.dims[-1]), rows), Spec.of(q.dims[:-1], rows)))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        out, lse = self.outputs
        read = (*self.inputs[:5], out, lse, cotangents[out])
        whole = ScanGradient(read, ("?0", "?1", "?2"), self.sequence, self.heads)
        # A sink's share of the weights is exp(sink - lse), and its value is zero: of the softmax's Jacobian the row sum stays.
        sinks = [(name, Map((cotangents[out], out, lse, name), ("?",), "sink_share")) for name in self.inputs[5:]]
        return [*((name, whole) for name in self.inputs[:3]), *sinks]

    def flops(self, placed: Placed) -> Polynomial:
        return _attention_flops(placed, self.sequence, over_keys=1, over_values=1)


@dataclass(frozen=True, slots=True)
class ScanGradient(Operation):
    """The gradient of attention, which rebuilds the scores: (a scan's first five operands, output, lse, dy) -> (dq, dk, dv).

    dk and dv sum over the queries and over the query heads of a group, so they are partial where those are split.
    """

    sequence: str = "T"
    heads: Dims = ("K", "G", "H")

    @property
    def kind(self) -> str:
        return "scan"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        forward = Scan((), (), self.sequence, self.heads).place(specs[:5], dims, fixed)
        q, k, v = forward.inputs[:3]
        out, lse = forward.outputs
        summed = (*q.axes_of(self.sequence), *(a for d in q.dims if d not in k.dims for a in q.axes_of(d)))
        return Placed((*forward.inputs, out, lse, out), (q, k.with_partial(summed), v.with_partial(summed)))

    def flops(self, placed: Placed) -> Polynomial:
        """Scores again, and from them dq and dk over the width of a key; dv and the scores' gradient over that of a value."""
        return _attention_flops(placed, self.sequence, over_keys=3, over_values=2)


def _attention_flops(placed: Placed, sequence: str, *, over_keys: int, over_values: int) -> Polynomial:
    """2 FLOPs per element of each product over the part of the scores that is not masked: the symbol `span` is its share,
    a half for causal attention (the diagonal's half is dropped), less with a sliding window."""
    q, k, v = placed.inputs[:3]
    scores = [Local(d, q.axes_of(d)) for d in q.dims[:-1]] + [Local(sequence, k.axes_of(sequence))]
    widths = ((q.dims[-1], over_keys), (v.dims[-1], over_values))
    return total(product([*scores, Local(width, ()), "span"], 2.0 * products) for width, products in widths)


@dataclass(frozen=True, slots=True)
class Route(Operation):
    """Gates from a router's logits [B, T, E]: the softmax over the k largest of each token, zero for the other experts.

    The experts' dim is needed whole; tokens are independent. Source: Jiang et al. 2024 (Mixtral), section 2.1.
    """

    num_chosen: str = "k"
    dim: str = "E"

    @property
    def kind(self) -> str:
        return "route"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        whole = [spec.with_axes(self.dim, ()).with_partial(()) for spec in specs]
        return Placed(tuple(whole), (whole[0],))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        (gates,) = self.outputs
        return [(self.inputs[0], RouteGradient((cotangents[gates], gates), ("?",), self.num_chosen, self.dim))]


@dataclass(frozen=True, slots=True)
class RouteGradient(Route):
    """The gradient of the softmax over the chosen experts, from that of the gates and the gates."""

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        return []


@dataclass(frozen=True, slots=True)
class Carry(Operation):
    """Hands a tensor to the next pipeline stage unchanged: a send and a receive over `pp`."""

    axis: str = "pp"

    @property
    def kind(self) -> str:
        return "carry"

    def place(
        self, specs: Sequence[Spec], dims: Mapping[str, Dims], fixed: Callable[[str], bool], goal: Spec | None = None
    ) -> Placed:
        return Placed(tuple(specs), tuple(specs))

    def gradients(self, cotangents: Mapping[str, str], dims: Mapping[str, Dims]) -> list[tuple[str, Operation]]:
        return [(self.inputs[0], Carry((cotangents[self.outputs[0]],), ("?",), self.axis))]
