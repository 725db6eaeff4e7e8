"""A sharded product as source text that runs without Shardwise: on JAX's `shard_map`, or on `torch.distributed`.

`listing` turns a program's steps into lines to write, with a variable for every tensor, an einsum equation for every product
and the dims that a collective acts on; the two backends only spell them. The emitted file holds one function, `product`,
that works on one device's shards, and a `main` that compares it with the unsharded product.
"""

from __future__ import annotations

import builtins
import itertools
import json
import keyword
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shardwise.derive.expression import ShardedExpression
from shardwise.derive.sharded_program import Communicate, Compute, ShardedProgram, Step
from shardwise.model.operations import Contract
from shardwise.sharding.collectives import Collective, Kind
from shardwise.sharding.device_shards import part_ratios, sends
from shardwise.sharding.mesh import Mesh
from shardwise.sharding.notation import einsum_of, einsum_subscripts, letters_of
from shardwise.sharding.spec import Axes, Spec
from shardwise.values.errors import InputError

Key = tuple[str, Spec]  # a tensor in one of its shardings

# Names that an emitted file uses itself.
RESERVED = frozenset({
    "jax", "jnp", "lax", "np", "torch", "dist", "json", "math", "os", "sys", "mesh", "rng", "seed", "expected", "error",
    "result", "sharded", "shard", "relative", "cuda", "device", "main", "make_groups", "product", "own_part", "part_to_send",
    "slots", "in_axes_order", "in_group_order", "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "permute",
    *dir(builtins),
})  # fmt: skip
_WORDS = {
    Kind.ALL_GATHER: "all-gather", Kind.REDUCE_SCATTER: "reduce-scatter",
    Kind.ALL_REDUCE: "all-reduce", Kind.ALL_TO_ALL: "all-to-all",
    Kind.PERMUTE: "permute", Kind.SLICE: "slice",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """An input: its variable, how it is written (`A[I_X, J]`), and the shape of the whole array.

    An operand that is a partial sum has a leading dim, the summands, which its partial axes split.
    """

    variable: str
    text: str
    spec: Spec
    shape: tuple[int, ...]

    @property
    def drawn(self) -> str:
        """The line that draws it; of a partial sum, every summand."""
        note = f", its summands along {', '.join(self.spec.partial)} stacked" if self.spec.partial else ""
        return f"{self.variable} = rng.standard_normal({self.shape}, dtype=np.float32)  # {self.text}{note}"

    @property
    def whole(self) -> str:
        """The unsharded array in float64."""
        text = f"{self.variable}.astype(np.float64)"
        return f"{text}.sum(axis=0)" if self.spec.partial else text


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A collective. `gathered` and `split` are the dims that lose and gain the axes.

    In a permute the i-th device along the axes sends to the `destinations[i]`-th: its whole shard or, of the parts that
    `counts` cuts it into along each dim, the `parts[i]`-th (the last dim the fastest). Its axes are in the mesh's order:
    `lax.ppermute` numbers devices so, whatever the order it is given; the other collectives number them as told.
    """

    comment: str
    target: str
    source: str
    kind: Kind
    axes: Axes
    gathered: int
    split: int
    destinations: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    @property
    def cuts(self) -> bool:
        return math.prod(self.counts) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplied:
    """A local product, or the sum of one operand, as an einsum."""

    comment: str
    target: str
    sources: tuple[str, ...]
    equation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """What a backend writes. `equation` is the whole product's; `text` the result as it is written, `C[I_X, K]`."""

    title: str
    mesh: Mesh
    operands: tuple[Operand, ...]
    steps: tuple[Moved | Multiplied, ...]
    result: str
    text: str
    spec: Spec
    equation: str

    @property
    def mesh_text(self) -> str:
        return ", ".join(f"{axis} = {size}" for axis, size in self.mesh.axes) or "no axes"

    @property
    def moved(self) -> tuple[Moved, ...]:
        return tuple(step for step in self.steps if isinstance(step, Moved))

    @property
    def kinds(self) -> frozenset[Kind]:
        return frozenset(step.kind for step in self.moved)


def tuple_text(names: Iterable[str]) -> str:
    """Names as the text of a tuple, with double quotes."""
    quoted = [json.dumps(name) for name in names]
    return f"({quoted[0]},)" if len(quoted) == 1 else f"({', '.join(quoted)})"


def filled(template: str, listing: Listing, array: str, call: Callable[[Moved | Multiplied], str]) -> str:
    """The template of the product's function with what the listing says; `call` writes a step, `array` is a parameter's type."""
    return template.format(
        parameters=", ".join(f"{operand.variable}: {array}" for operand in listing.operands),
        text=listing.text,
        operands=", ".join(operand.text for operand in listing.operands),
        steps="\n".join(f"    {line}" for step in listing.steps for line in statements(step, call(step))),
        result=listing.result,
    )


def statements(step: Moved | Multiplied, call: str) -> list[str]:
    """The lines of a step: its comment, the part that a device sends where it is not the whole shard, and the call."""
    lines = [f"# {step.comment}", f"{step.target} = {call}"]
    if isinstance(step, Moved) and step.cuts:
        arguments = f"{step.source}, {tuple_text(step.axes)}, counts={step.counts}, parts={list(step.parts)}"
        lines.insert(1, f"{step.target} = part_to_send({arguments})")
    return lines


def listing(made: ShardedExpression, program: ShardedProgram) -> Listing:
    """The program with a variable for every tensor and a letter for every dim."""
    reads = [_reads(step) for step in program.steps]
    end: Key = made.result_name, program.specs[made.result_name]
    variables = _Variables()
    letters = letters_of(dim for spec in made.operands for dim in spec.dims)
    operands = []
    for name, given in zip(made.names, made.operands, strict=True):
        spec = next((s for keys in reads for n, s in keys if n == name), given)
        variable = variables.define((name, spec), _after(reads, -1, end))
        operands.append(_operand(made, variable, name, spec))
    steps: list[Moved | Multiplied] = []
    for index, step in enumerate(program.steps):
        later = _after(reads, index, end)
        if isinstance(step, Communicate):
            steps.append(_moved(step, made.mesh, variables, later))
        else:
            steps.append(_multiplied(step, letters, variables, later))
    return Listing(
        title=str(made.expression), mesh=made.mesh, operands=tuple(operands), steps=tuple(steps), result=variables.held[end],
        text=f"{end[0]}{end[1]}", spec=end[1], equation=einsum_of(made.expression),
    )  # fmt: skip


def _operand(made: ShardedExpression, variable: str, name: str, spec: Spec) -> Operand:
    summands = (made.mesh.size(spec.partial),) if spec.partial else ()
    shape = (*summands, *(made.sizes[dim] for dim in spec.dims))
    return Operand(variable=variable, text=f"{name}{spec}", spec=spec, shape=shape)


def _reads(step: Step) -> list[Key]:
    if isinstance(step, Communicate):
        return [(step.tensor.name, step.collective.before)]
    return list(zip(step.operation.operands, step.placed.inputs, strict=True))


def _after(reads: Sequence[Sequence[Key]], index: int, end: Key) -> set[Key]:
    """What the steps behind `index`, and the end, still read."""
    return {end, *itertools.chain.from_iterable(reads[index + 1 :])}


class _Variables:
    """A variable for each tensor in each sharding; one that nothing reads any more is written over."""

    def __init__(self) -> None:
        self.bases: dict[str, str] = {}
        self.held: dict[Key, str] = {}

    def base(self, name: str) -> str:
        """`W1` is `w1`, the product `A*B` is `a_b`, `A.sum` is `a_sum`, `A'` is `a_prime`; a taken one gets an underscore."""
        if name not in self.bases:
            found = name.lower().replace("*", "_").replace(".", "_").replace("'", "_prime")
            while keyword.iskeyword(found) or found in RESERVED or found in self.bases.values():
                found += "_"
            self.bases[name] = found
        return self.bases[name]

    def define(self, key: Key, later: set[Key]) -> str:
        base = self.base(key[0])
        busy = {variable for held, variable in self.held.items() if held in later and held != key}
        numbered = (f"{base}_{number}" for number in itertools.count(2))
        variable = next(name for name in itertools.chain([base], numbered) if name not in busy)
        self.held = {held: name for held, name in self.held.items() if name != variable}
        self.held[key] = variable
        return variable


def _multiplied(step: Compute, letters: Mapping[str, str], variables: _Variables, later: set[Key]) -> Multiplied:
    if not isinstance(step.operation, Contract):
        raise InputError(f"emit: found the operation {step.operation.kind!r}; only products can be written")
    (out,), (name,) = step.placed.outputs, step.operation.outputs
    keys = _reads(step)
    sources = tuple(variables.held[key] for key in keys)
    return Multiplied(
        comment=f"{name}: {out} = " + " * ".join(f"{operand}{spec}" for operand, spec in keys),
        target=variables.define((name, out), later), sources=sources,
        equation=einsum_subscripts([spec.dims for spec in step.placed.inputs], out.dims, letters),
    )  # fmt: skip


def _moved(step: Communicate, mesh: Mesh, variables: _Variables, later: set[Key]) -> Moved:
    name, collective = step.tensor.name, step.collective
    before, after = collective.before, collective.after
    if collective.kind not in _WORDS or before.reduction != "sum":
        raise InputError(f"emit: {collective} of {name} cannot be written; only {', '.join(_WORDS)} can")
    grows = [len(new) - len(old) for old, new in zip(before.axes, after.axes, strict=True)]
    move = Moved(
        comment=f"{name}: {before} -> {after}, {_WORDS[collective.kind]} over {', '.join(collective.axes)}",
        source=variables.held[name, before], target=variables.define((name, after), later),
        kind=collective.kind, axes=collective.axes,
        gathered=next((i for i, change in enumerate(grows) if change < 0), 0),
        split=next((i for i, change in enumerate(grows) if change > 0), 0),
    )  # fmt: skip
    return _permute(move, collective, mesh) if collective.kind is Kind.PERMUTE else move


def _permute(move: Moved, collective: Collective, mesh: Mesh) -> Moved:
    """Who sends which part to whom among the devices along the axes: the same wherever the group is on the other axes."""
    group = Mesh(tuple((axis, size if axis in collective.axes else 1) for axis, size in mesh.axes))
    sent, counts = sends(collective, group), part_ratios(collective, group)
    numbers = [sum(n * math.prod(counts[dim + 1 :]) for dim, n in enumerate(send.part)) for send in sent]
    return replace(
        move,
        axes=tuple(axis for axis in mesh.names if axis in collective.axes),
        destinations=tuple(send.destination for send in sent),
        counts=counts,
        parts=tuple(numbers),
    )
