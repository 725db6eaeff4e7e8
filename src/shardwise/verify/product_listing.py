"""A sharded product as source text that runs without Shardwise: on JAX's `shard_map`, or on `torch.distributed`.

`build_listing` turns a program's steps into lines to write: a variable per tensor, an einsum equation per product, the
dims that a collective acts on; the backends only spell them. An emitted file has one function, `product`, that works on
one device's shards, and a `main` that compares it with the unsharded product.
"""

from __future__ import annotations

import builtins
import itertools
import json
import keyword
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.derive import CollectiveStep, ComputeStep, ShardedExpression, ShardedProgram, ShardedTensor
from shardwise.model import Contract
from shardwise.sharding import Axes, Collective, CollectiveKind, Mesh, Spec, assign_letters, einsum_subscripts
from shardwise.sharding.notation import einsum_equation
from shardwise.sharding.shard_placement import permute_sends, permute_split_factors
from shardwise.values import InputError

# Names that an emitted file uses itself.
RESERVED_NAMES = frozenset({
    "jax", "jnp", "lax", "np", "torch", "dist", "json", "math", "os", "sys", "mesh", "rng", "seed", "expected", "error",
    "result", "sharded", "shard", "relative", "cuda", "device", "main", "make_groups", "product", "own_part",
    "part_to_send", "slots", "in_axes_order", "in_group_order", "all_gather", "reduce_scatter", "all_reduce",
    "all_to_all", "permute", *dir(builtins),
})  # fmt: skip
_KIND_TEXTS = {
    CollectiveKind.ALL_GATHER: "all-gather", CollectiveKind.REDUCE_SCATTER: "reduce-scatter",
    CollectiveKind.ALL_REDUCE: "all-reduce", CollectiveKind.ALL_TO_ALL: "all-to-all",
    CollectiveKind.PERMUTE: "permute", CollectiveKind.SLICE: "slice",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedOperand:
    """An input: its variable, its notation (`A[I_X, J]`), and the shape of the unsharded array. An operand that is a
    partial sum has a leading dim, the summands, which its partial axes split."""

    variable: str
    text: str
    spec: Spec
    shape: tuple[int, ...]

    @property
    def random_line(self) -> str:
        """Source line that draws the operand; for a partial sum, every summand."""
        note = f", its summands along {', '.join(self.spec.partial)} stacked" if self.spec.partial else ""
        return f"{self.variable} = rng.standard_normal({self.shape}, dtype=np.float32)  # {self.text}{note}"

    @property
    def unsharded_text(self) -> str:
        """Expression of the unsharded array in float64."""
        text = f"{self.variable}.astype(np.float64)"
        return f"{text}.sum(axis=0)" if self.spec.partial else text


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveLine:
    """A collective. `gathered` and `split` are the dims that lose and gain the axes.

    In a permute the i-th device along the axes sends to the `destinations[i]`-th: its whole shard or, of the parts that
    `counts` cuts it into along each dim, the `parts[i]`-th (the last dim the fastest). Its axes are in the mesh's
    order, because `lax.ppermute` numbers devices so in any case; the other collectives number them in the order given.
    """

    comment: str
    target: str
    source: str
    kind: CollectiveKind
    axes: Axes
    gathered: int
    split: int
    destinations: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    @property
    def sends_part(self) -> bool:
        return math.prod(self.counts) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class EinsumLine:
    """A local product, or the sum of one operand, as an einsum."""

    comment: str
    target: str
    sources: tuple[str, ...]
    equation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductListing:
    """Listing of a product: `equation` of the unsharded product, and the result's notation as `text`, `C[I_X, K]`."""

    title: str
    mesh: Mesh
    operands: tuple[ListedOperand, ...]
    steps: tuple[CollectiveLine | EinsumLine, ...]
    result: str
    text: str
    spec: Spec
    equation: str

    @property
    def mesh_text(self) -> str:
        return ", ".join(f"{axis} = {size}" for axis, size in self.mesh.axes) or "no axes"

    @property
    def collectives(self) -> tuple[CollectiveLine, ...]:
        return tuple(step for step in self.steps if isinstance(step, CollectiveLine))

    @property
    def kinds(self) -> frozenset[CollectiveKind]:
        return frozenset(step.kind for step in self.collectives)


def tuple_text(names: Iterable[str]) -> str:
    """Return the source of a tuple of strings, with double quotes."""
    quoted = [json.dumps(name) for name in names]
    return f"({quoted[0]},)" if len(quoted) == 1 else f"({', '.join(quoted)})"


def fill_template(
    template: str, listing: ProductListing, array: str, call: Callable[[CollectiveLine | EinsumLine], str]
) -> str:
    """Fill the template of the product's function; `call` writes a step, `array` is a parameter's type."""
    return template.format(
        parameters=", ".join(f"{operand.variable}: {array}" for operand in listing.operands),
        text=listing.text,
        operands=", ".join(operand.text for operand in listing.operands),
        steps="\n".join(f"    {line}" for step in listing.steps for line in format_statements(step, call(step))),
        result=listing.result,
    )


def format_statements(step: CollectiveLine | EinsumLine, call: str) -> list[str]:
    """Return the lines of a step: its comment, the part that a device sends unless it is the whole shard, the call."""
    lines = [f"# {step.comment}", f"{step.target} = {call}"]
    if isinstance(step, CollectiveLine) and step.sends_part:
        arguments = f"{step.source}, {tuple_text(step.axes)}, counts={step.counts}, parts={list(step.parts)}"
        lines.insert(1, f"{step.target} = part_to_send({arguments})")
    return lines


def build_listing(product: ShardedExpression, program: ShardedProgram) -> ProductListing:
    """Return the program with a variable for every tensor and a letter for every dim."""
    reads = [step.reads for step in program.steps]
    end_key = ShardedTensor(product.result_name, program.specs[product.result_name])
    variables = _Variables()
    letters = assign_letters(dim for spec in product.operands for dim in spec.dims)
    operands = []
    for name, operand_spec in zip(product.names, product.operands, strict=True):
        spec = next((s for keys in reads for n, s in keys if n == name), operand_spec)
        variable = variables.define(ShardedTensor(name, spec), _read_later(reads, -1, end_key))
        operands.append(_operand(product, variable, name, spec))
    steps: list[CollectiveLine | EinsumLine] = []
    for index, step in enumerate(program.steps):
        later = _read_later(reads, index, end_key)
        if isinstance(step, CollectiveStep):
            steps.append(_collective_line(step, product.mesh, variables, later))
        else:
            steps.append(_einsum_line(step, letters, variables, later))
    return ProductListing(
        title=str(product.expression), mesh=product.mesh, operands=tuple(operands), steps=tuple(steps),
        result=variables.by_key[end_key], text=f"{end_key[0]}{end_key[1]}", spec=end_key[1],
        equation=einsum_equation(product.expression),
    )  # fmt: skip


def _operand(product: ShardedExpression, variable: str, name: str, spec: Spec) -> ListedOperand:
    summands = (product.mesh.size(spec.partial),) if spec.partial else ()
    shape = (*summands, *(product.sizes[dim] for dim in spec.dims))
    return ListedOperand(variable=variable, text=f"{name}{spec}", spec=spec, shape=shape)


def _read_later(reads: Sequence[Sequence[ShardedTensor]], index: int, end_key: ShardedTensor) -> set[ShardedTensor]:
    """Return the tensors that are still read after step `index`, and the result."""
    return {end_key, *itertools.chain.from_iterable(reads[index + 1 :])}


class _Variables:
    """A variable for each tensor in each sharding; a variable that nothing reads any more is reused."""

    def __init__(self) -> None:
        self.bases: dict[str, str] = {}
        self.by_key: dict[ShardedTensor, str] = {}

    def base(self, name: str) -> str:
        """Return `w1` for `W1`, `a_b` for `A*B`, `a_sum` for `A.sum`, `a_prime` for `A'`; underscores until it is free."""
        if name not in self.bases:
            variable = name.lower().replace("*", "_").replace(".", "_").replace("'", "_prime")
            while keyword.iskeyword(variable) or variable in RESERVED_NAMES or variable in self.bases.values():
                variable += "_"
            self.bases[name] = variable
        return self.bases[name]

    def define(self, key: ShardedTensor, later: set[ShardedTensor]) -> str:
        base = self.base(key[0])
        busy = {variable for other_key, variable in self.by_key.items() if other_key in later and other_key != key}
        numbered_names = (f"{base}_{number}" for number in itertools.count(2))
        variable = next(name for name in itertools.chain([base], numbered_names) if name not in busy)
        self.by_key = {other_key: name for other_key, name in self.by_key.items() if name != variable}
        self.by_key[key] = variable
        return variable


def _einsum_line(
    step: ComputeStep, letters: Mapping[str, str], variables: _Variables, later: set[ShardedTensor]
) -> EinsumLine:
    if not isinstance(step.operation, Contract):
        raise InputError(f"emit: found the operation {step.operation.kind!r}; only products can be written")
    (out,), (name,) = step.placed.outputs, step.operation.outputs
    sources = tuple(variables.by_key[tensor] for tensor in step.reads)
    return EinsumLine(
        comment=f"{name}: {out} = " + " * ".join(f"{operand}{spec}" for operand, spec in step.reads),
        target=variables.define(step.writes[0], later), sources=sources,
        equation=einsum_subscripts([spec.dims for spec in step.placed.inputs], out.dims, letters),
    )  # fmt: skip


def _collective_line(
    step: CollectiveStep, mesh: Mesh, variables: _Variables, later: set[ShardedTensor]
) -> CollectiveLine:
    name, collective = step.tensor.name, step.collective
    before, after = collective.before, collective.after
    if collective.kind not in _KIND_TEXTS or before.reduction != "sum":
        raise InputError(f"emit: {collective} of {name} cannot be written; only {', '.join(_KIND_TEXTS)} can")
    axis_changes = [len(new) - len(old) for old, new in zip(before.axes, after.axes, strict=True)]
    line = CollectiveLine(
        comment=f"{name}: {before} -> {after}, {_KIND_TEXTS[collective.kind]} over {', '.join(collective.axes)}",
        source=variables.by_key[step.before], target=variables.define(step.after, later),
        kind=collective.kind, axes=collective.axes,
        gathered=next((i for i, change in enumerate(axis_changes) if change < 0), 0),
        split=next((i for i, change in enumerate(axis_changes) if change > 0), 0),
    )  # fmt: skip
    return _with_destinations(line, collective, mesh) if collective.kind is CollectiveKind.PERMUTE else line


def _with_destinations(line: CollectiveLine, collective: Collective, mesh: Mesh) -> CollectiveLine:
    """Return a permute with who sends which part to whom along its axes, the same at any place on the others."""
    group = Mesh(tuple((axis, size if axis in collective.axes else 1) for axis, size in mesh.axes))
    sends, counts = permute_sends(collective, group), permute_split_factors(collective, group)
    part_numbers = [sum(n * math.prod(counts[dim + 1 :]) for dim, n in enumerate(send.part)) for send in sends]
    return replace(
        line, axes=tuple(axis for axis in mesh.names if axis in collective.axes),
        destinations=tuple(send.destination for send in sends), counts=counts, parts=tuple(part_numbers),
    )  # fmt: skip
