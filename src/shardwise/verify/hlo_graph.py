"""HLO text as one graph of simple instructions, with called computations inlined; device groups."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.values.input_texts import parse_integer

Groups = tuple[tuple[int, ...], ...]


@dataclass(slots=True, eq=False)
class HloNode:
    """An instruction of the inlined program; compared by identity."""

    opcode: str
    shape: str
    operands: list[HloNode]
    literal: str
    attributes: str
    users: list[HloNode] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """Elements of the result; for a tuple, of all its elements together."""
        return sum(math.prod(dims) for _, dims in _shapes(self.shape))

    @property
    def dims(self) -> tuple[int, ...]:
        return _shapes(self.shape)[0][1]

    @property
    def is_float(self) -> bool:
        return all("f" in dtype for dtype, _ in _shapes(self.shape))


def inline_computations(text: str) -> list[HloNode]:
    """Return the instructions of a module from its entry on, in order, each with its users; the last is the result."""
    computations, entry = _computations(text)
    nodes: list[HloNode] = []
    root = _Inliner(computations, nodes).run(entry, None)
    nodes.append(HloNode("result", root.shape, [root], "", ""))
    for node in nodes:
        for operand in node.operands:
            if node not in operand.users:
                operand.users.append(node)
    return nodes


@dataclass(frozen=True, slots=True)
class _Instruction:
    name: str
    root: bool
    shape: str
    opcode: str
    arguments: str
    attributes: str


_Computation = list[_Instruction]
_HEAD = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = ")
_OPENING = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{\s*$")
_CALLED = re.compile(r"(?:calls|to_apply|body)=%?([\w.\-]+)")
_INLINED = ("fusion", "call", "async-start", "while")


def _computations(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    entry = current = ""
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        opening = _OPENING.match(line)
        if opening is not None and " = " not in line.split("(")[0]:
            current = opening.group(2)
            computations[current] = []
            entry = current if opening.group(1) else entry
        elif current and (head := _HEAD.match(line)) is not None:
            computations[current].append(_instruction(head, line[head.end() :]))
    return computations, entry


def _instruction(head: re.Match[str], rest: str) -> _Instruction:
    shape_end = _closing(rest, 0) if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", shape_end)
    closing = _closing(rest, opening)
    return _Instruction(
        head.group(2), head.group(1) is not None, rest[:shape_end], rest[shape_end:opening].strip(),
        rest[opening + 1 : closing - 1], rest[closing:],
    )  # fmt: skip


def _closing(text: str, start: int) -> int:
    """Return the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    return len(text)


def _shapes(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    arrays = re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
    return [(dtype, tuple(int(size) for size in dims.split(",") if size)) for dtype, dims in arrays]


class _Inliner:
    """Puts called computations in place of their calls; the body of a loop appears once."""

    def __init__(self, computations: Mapping[str, _Computation], nodes: list[HloNode]) -> None:
        self.computations, self.nodes = computations, nodes

    def run(self, name: str, arguments: Sequence[HloNode] | None) -> HloNode:
        nodes_by_name: dict[str, HloNode] = {}
        root = None
        for instruction in self.computations[name]:
            nodes_by_name[instruction.name] = node = self.node(instruction, nodes_by_name, arguments)
            root = node if instruction.root else root
        assert root is not None, f"{name} has no root"
        return root

    def node(
        self, instruction: _Instruction, known_nodes: Mapping[str, HloNode], arguments: Sequence[HloNode] | None
    ) -> HloNode:
        opcode = instruction.opcode
        if opcode == "parameter" and arguments is not None:
            return arguments[int(instruction.arguments)]
        names = re.findall(r"%([\w.\-]+)", instruction.arguments)
        operands = [known_nodes[name] for name in names if name in known_nodes]
        called = _CALLED.search(instruction.attributes)
        if opcode in _INLINED and called is not None:
            return self.run(called.group(1), operands)
        if opcode in ("async-done", "async-update"):
            return operands[0]
        if opcode == "get-tuple-element" and operands[0].opcode == "tuple":
            return operands[0].operands[tuple_index(instruction.attributes)]
        node = HloNode(opcode, instruction.shape, operands, instruction.arguments, instruction.attributes)
        self.nodes.append(node)
        return node


def tuple_index(attributes: str) -> int:
    """Return which element of a tuple a get-tuple-element selects."""
    match = re.search(r"index=(\d+)", attributes)
    return parse_integer(match.group(1)) if match else 0


# Groups of devices


def replica_groups(attributes: str, num_devices: int) -> Groups:
    """Return device groups in any of the forms in which HLO writes them: lists, an iota, or axes of a mesh."""
    iota = re.search(r"replica_groups=\[(\d+),(\d+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", attributes)
    if iota is not None:
        return _chunks(_iota(iota.group(3)), parse_integer(iota.group(2)))
    mesh = re.search(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?\]\S*)\))? \{([^}]*)\}", attributes)
    if mesh is not None:
        return _mesh_groups(*mesh.groups())
    lists = re.search(r"replica_groups=\{(\{[\d,{} ]*\})?\}", attributes)
    groups = _lists(lists.group(1)) if lists is not None and lists.group(1) else ()
    return groups or (tuple(range(num_devices)),)


def _lists(text: str) -> Groups:
    return tuple(tuple(int(i) for i in group.split(",")) for group in re.findall(r"\{([\d, ]+)\}", text))


def permute_pairs(attributes: str) -> Groups:
    """Return source and target of each message of a permute."""
    match = re.search(r"source_target_pairs=\{((?:\{\d+, ?\d+\},? ?)*)\}", attributes)
    assert match is not None, "a permute without pairs"
    return _lists(match.group(1))


def _iota(text: str) -> list[int]:
    """Return the numbers of an iota: `[2,4]T(1,0)` is 0..7 in two rows, transposed, in order."""
    shape, _, order = text.partition("T")
    sizes = [int(i) for i in shape.strip("[]").split(",")]
    return _transpose(sizes, [int(i) for i in order.strip("()").split(",")] if order else list(range(len(sizes))))


def _transpose(sizes: Sequence[int], order: Sequence[int]) -> list[int]:
    """Return the numbers of a row-major grid, read with its dims in another order."""
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    indices = itertools.product(*(range(sizes[i]) for i in order))
    return [sum(index * strides[i] for index, i in zip(point, order, strict=True)) for point in indices]


def _chunks(numbers: Sequence[int], size: int) -> Groups:
    return tuple(tuple(numbers[i : i + size]) for i in range(0, len(numbers), size))


def _mesh_groups(axes: str, devices: str | None, members: str) -> Groups:
    """Return the groups of `mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'b'}`. `'b':(2)2` is the part of b of size 2
    below a part of size 2."""
    names = [(name, int(size)) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)]
    parts = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", members)
    sizes: list[int] = []
    indices: dict[tuple[str, int], int] = {}
    for name, size in names:
        cuts = sorted({1, size, *(int(b) * f for n, b, s in parts if n == name and s for f in (1, int(s)))})
        for before, after in itertools.pairwise(cuts or [1]):
            indices[name, before] = len(sizes)
            sizes.append(after // before)
        if size == 1:
            indices[name, 1] = len(sizes)
            sizes.append(1)
    inner = [i for n, b, s in parts for i in _span(indices, sizes, n, int(b or 1), int(s) if s else dict(names)[n])]
    order = [i for i in range(len(sizes)) if i not in inner] + inner
    numbers = _iota(devices) if devices else list(range(math.prod(sizes)))
    return _chunks([numbers[i] for i in _transpose(sizes, order)], math.prod(sizes[i] for i in inner))


def _span(indices: Mapping[tuple[str, int], int], sizes: Sequence[int], name: str, before: int, size: int) -> list[int]:
    """Return the atomic parts of an axis that make up its part of `size` below a part of size `before`."""
    return [i for (n, b), i in indices.items() if n == name and before <= b and b * sizes[i] <= before * size]
