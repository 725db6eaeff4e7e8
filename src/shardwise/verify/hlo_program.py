"""Program that a compiler chose, read from the text of its HLO: collectives with their groups and payloads, and FLOPs.

Fusions, calls and asynchronous computations are inlined, so that the program is one graph of simple instructions. A
backend without a ReduceScatter writes an AllReduce of which each device keeps a part: the part's offset is computed for
every device, and such an AllReduce counts as the ReduceScatter that it is.
"""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.sharding import CollectiveKind
from shardwise.values import InputError
from shardwise.values.input_texts import parse_integer
from shardwise.verify.hlo_graph import Groups, HloNode, inline_computations, permute_pairs, replica_groups, tuple_index


@dataclass(frozen=True, slots=True)
class HloCollective:
    """A collective: its groups of devices, and the elements of its payload on one device. `payload` is as
    `Collective.payload_elements`; the groups of a permute are its (source, target) pairs."""

    kind: CollectiveKind
    groups: Groups
    payload: float

    @property
    def received_elements(self) -> float:
        """Elements that a device receives, by the convention of `sharding.collectives.received_elements`."""
        if self.kind is CollectiveKind.PERMUTE:
            return self.payload if any(source != target for source, target in self.groups) else 0.0
        n = len(self.groups[0])
        return self.payload * (n - 1) / n * (2.0 if self.kind is CollectiveKind.ALL_REDUCE else 1.0)


class HloProgram:
    """Inlined graph of an HLO module; `num_devices` is its number of partitions."""

    def __init__(self, text: str) -> None:
        partitions = re.search(r"num_partitions=(\d+)", text)
        self.num_devices = parse_integer(partitions.group(1)) if partitions else 1
        self.nodes = inline_computations(text)

    def collectives(self) -> tuple[HloCollective, ...]:
        """Return every collective that moves data, once (an asynchronous one may be written several times)."""
        collectives: list[HloCollective] = []
        channels: set[tuple[CollectiveKind, str]] = set()
        folded: set[int] = set()
        for node in self.nodes:
            kind = _KINDS.get(node.opcode.removesuffix("-start"))
            if kind is None or id(node) in folded:
                continue
            channel = re.search(r"channel_id=(\d+)", node.attributes)
            if channel is not None and (kind, channel.group(1)) in channels:
                continue
            channels |= {(kind, channel.group(1))} if channel is not None else set()
            if kind is CollectiveKind.ALL_REDUCE:
                collectives += _AllReduce(self, node, folded).collectives()
            else:
                collectives.append(self.read_collective(kind, node))
        return tuple(c for c in collectives if c.received_elements)

    def read_collective(self, kind: CollectiveKind, node: HloNode) -> HloCollective:
        is_permute = kind is CollectiveKind.PERMUTE
        groups = permute_pairs(node.attributes) if is_permute else replica_groups(node.attributes, self.num_devices)
        payload = sum(operand.elements for operand in node.operands)
        return HloCollective(kind, groups, payload * (len(groups[0]) if kind is CollectiveKind.ALL_GATHER else 1))

    def multiplications(self) -> float:
        """Return the floating-point multiplications on one device."""
        return float(sum(_multiplications(node) for node in self.nodes))

    def flops(self) -> float:
        """Return the FLOPs on one device. Two per multiplication of a product that is summed, one if nothing is, and
        one per element that is summed without one."""
        products = sum(_multiplications(node) * (2 if _is_summed(node) else 1) for node in self.nodes)
        return float(products + sum(node.operands[0].elements for node in self.nodes if _is_plain_sum(node)))


_KINDS = {
    "all-gather": CollectiveKind.ALL_GATHER,
    "reduce-scatter": CollectiveKind.REDUCE_SCATTER,
    "all-reduce": CollectiveKind.ALL_REDUCE,
    "all-to-all": CollectiveKind.ALL_TO_ALL,
    "collective-permute": CollectiveKind.PERMUTE,
}


# An AllReduce of which every device keeps a part

_SAME_VALUES = ("bitcast", "convert", "copy", "reshape", "transpose", "all-reduce-done", "copy-start", "copy-done")


class _AllReduce:
    """An AllReduce, which may be a ReduceScatter, depending on how its result is used. It counts as a ReduceScatter if
    every reader is a dynamic-slice; two AllReduces in a row count as one over the joined groups."""

    def __init__(self, program: HloProgram, node: HloNode, folded: set[int]) -> None:
        self.program, self.node, self.folded = program, node, folded
        self.groups = replica_groups(node.attributes, program.num_devices)

    def collectives(self) -> list[HloCollective]:
        collectives = []
        for index, operand in enumerate(self.node.operands):
            uses = list(self.uses(self.node, index if len(self.node.operands) > 1 else None))
            collectives += self.reduced(float(operand.elements), self.groups, uses)
        return collectives

    def uses(self, node: HloNode, index: int | None) -> Iterator[HloNode]:
        """Yield the readers of the values, through conversions; `index` selects an element of a tuple."""
        for user in node.users:
            if user.opcode == "get-tuple-element" and (index is None or tuple_index(user.attributes) == index):
                yield from self.uses(user, None)
            elif user.opcode in _SAME_VALUES:
                yield from self.uses(user, index)
            elif user.opcode != "get-tuple-element":
                yield user

    def reduced(self, payload: float, groups: Groups, uses: Sequence[HloNode]) -> list[HloCollective]:
        if len(uses) == 1 and uses[0].opcode.removesuffix("-start") == "all-reduce" and len(uses[0].operands) == 1:
            self.folded.add(id(uses[0]))
            joined = _join_groups(groups, replica_groups(uses[0].attributes, self.program.num_devices))
            return self.reduced(payload, joined, list(self.uses(uses[0], None)))
        if not uses or any(use.opcode != "dynamic-slice" for use in uses):
            return [HloCollective(CollectiveKind.ALL_REDUCE, groups, payload)]
        offsets = [tuple(self.offsets(device, use) for use in uses) for device in range(self.program.num_devices)]
        return list(_split_all_reduce(payload, groups, offsets))

    def offsets(self, device: int, use: HloNode) -> tuple[int | None, ...]:
        index = _IndexArithmetic(device)
        start_values = [index.values(operand) for operand in use.operands[1:]]
        return tuple(values[0] if values else None for values in start_values)


def _join_groups(first: Groups, second: Groups) -> Groups:
    """Return the groups of an AllReduce over the first and then the second groups."""
    group_of = {device: set(group) for group in first for device in group}
    merged = {tuple(sorted(set().union(*(group_of.get(device, {device}) for device in group)))) for group in second}
    return tuple(sorted(merged))


def _split_all_reduce(payload: float, groups: Groups, offsets: Sequence[tuple[object, ...]]) -> Iterator[HloCollective]:
    """Yield a ReduceScatter among devices that keep different parts, an AllReduce among those that keep the same."""
    splits: list[list[tuple[int, ...]]] = []
    for group in groups:
        by_offset: dict[tuple[object, ...], list[int]] = {}
        for device in group:
            by_offset.setdefault(offsets[device], []).append(device)
        splits.append([tuple(members) for members in by_offset.values()])
    num_parts, num_copies = len(splits[0]), len(splits[0][0])
    if any(len(split) != num_parts or any(len(members) != num_copies for members in split) for split in splits):
        yield HloCollective(CollectiveKind.ALL_REDUCE, groups, payload)
        return
    yield HloCollective(
        CollectiveKind.REDUCE_SCATTER,
        tuple(devices for split in splits for devices in zip(*split, strict=True)),
        payload,
    )
    yield HloCollective(
        CollectiveKind.ALL_REDUCE, tuple(members for split in splits for members in split), payload / num_parts
    )


_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": lambda a, b: a // b if b else 0,
    "remainder": lambda a, b: a % b if b else 0, "minimum": min, "maximum": max, "and": operator.and_,
    "or": operator.or_,
}  # fmt: skip


class _IndexArithmetic:
    """Integers that a device computes from its number; arrays beyond the limit are data, not indices."""

    limit = 2**16

    def __init__(self, device: int) -> None:
        self.device = device

    def values(self, node: HloNode) -> list[int] | None:
        """Return the elements of a small integer array, or None if they depend on more than the device's number."""
        if node.opcode in ("partition-id", "replica-id"):
            return [self.device if node.opcode == "partition-id" else 0]
        if node.opcode == "constant":
            return _integers(node.literal)
        operand_values = [self.values(operand) for operand in node.operands] if node.elements <= self.limit else [None]
        operands = [v for v in operand_values if v]
        if len(operands) < len(operand_values) or not operands:
            return None
        if node.opcode in _SAME_VALUES or node.opcode == "broadcast":
            return operands[0] * (node.elements // len(operands[0]))
        if node.opcode == "clamp":
            return [min(max(v, low), high) for low, v, high in _align(operands)]
        if node.opcode == "dynamic-slice" and len(operands) == 2:
            start = min(max(operands[1][0], 0), len(operands[0]) - node.elements)
            return operands[0][start : start + node.elements]
        if node.opcode in _ARITHMETIC:
            return [_ARITHMETIC[node.opcode](a, b) for a, b in _align(operands)]
        return None


def _integers(literal: str) -> list[int] | None:
    """Return the elements of a constant, or None for an empty one. Raises `InputError` if the text omits them."""
    if "..." in literal:
        raise InputError(
            f"hlo: found constant({literal}), whose values the text leaves out; without them a ReduceScatter looks like an "
            "AllReduce: print the module with large constants (`verify.xla_worker.module_text`)"
        )
    return [parse_integer(i) for i in re.findall(r"-?\d+", literal)] or None


def _align(operands: Sequence[list[int]]) -> Iterable[tuple[int, ...]]:
    length = max(map(len, operands))
    return zip(*(v * (length // len(v)) for v in operands), strict=True)


# FLOPs


def _multiplications(node: HloNode) -> int:
    if node.opcode == "dot":
        return node.elements * _contracted(node, _numbers(node.attributes, "lhs_contracting_dims"))
    if node.opcode == "custom-call" and "dot_dimension_numbers" in node.attributes:
        return math.prod(node.dims) * _contracted(node, _gemm_dims(node.attributes))
    if node.opcode == "convolution":
        return node.elements * _kernel_elements(node)
    return node.elements if node.opcode == "multiply" and node.is_float else 0


def _is_summed(node: HloNode) -> bool:
    """Return True if the products are summed, by the instruction itself or, for small ones, by those that follow."""
    return node.opcode != "multiply" or _is_followed_by_sum(node)


def _is_followed_by_sum(node: HloNode) -> bool:
    return any(
        user.opcode in ("reduce", "reduce-window") or (user.opcode in _SAME_VALUES and _is_followed_by_sum(user))
        for user in node.users
    )


def _is_plain_sum(node: HloNode) -> bool:
    """Return True for a sum of numbers that are no products: the sum of one operand."""
    if node.opcode != "reduce" or not node.is_float:
        return False
    source = node.operands[0]
    while source.opcode in _SAME_VALUES:
        source = source.operands[0]
    return source.opcode != "multiply"


def _contracted(node: HloNode, dims: Sequence[int]) -> int:
    return math.prod(node.operands[0].dims[dim] for dim in dims)


def _numbers(attributes: str, name: str) -> list[int]:
    match = re.search(name + r"=\{([\d,]*)\}", attributes)
    return [int(i) for i in match.group(1).split(",") if i] if match else []


def _gemm_dims(attributes: str) -> list[int]:
    start = attributes.index("backend_config=") + len("backend_config=")
    config, _ = json.JSONDecoder().raw_decode(attributes[start:])
    numbers = config["gemm_backend_config"]["dot_dimension_numbers"]
    return [int(i) for i in numbers.get("lhs_contracting_dimensions", [])]


def _kernel_elements(node: HloNode) -> int:
    """Return the summands per output of a convolution, as which some backends write a matrix product: all dims of the
    kernel but that of the outputs."""
    labels = re.search(r"dim_labels=\w+_(\w+)->", node.attributes)
    assert labels is not None, "a convolution without labels"
    return math.prod(size for label, size in zip(labels.group(1), node.operands[1].dims, strict=True) if label != "o")
