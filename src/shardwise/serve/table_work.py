"""Work of the passes of a table's rows, derived from a model's programs of inference.

All sizes are linear in the tokens of a pass, in its decoding sequences or in its logits, once lengths and degrees are fixed:
each is evaluated once for every layout of a table (`TableWork.of`), and a pass of any number of sequences is a sum of multiples
(`work`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, NamedTuple

import numpy as np

from shardwise.derive.inference_unit import TOKEN_SLICE_AXES
from shardwise.model import Architecture, Role
from shardwise.model.operations import SLOTS, SPAN
from shardwise.serve.configuration_table import ConfigurationTable, Floats
from shardwise.serve.inference_pass import (
    DECODE,
    PREFILL,
    InferencePass,
    PassForm,
    PassUnit,
    SequenceGroup,
    inference_pass,
    num_selected,
    slots_of_group,
)
from shardwise.serve.pass_work import NO_PRODUCTS, Column, PassCollective, PassWork, Products, Routing
from shardwise.serve.resting_elements import (
    CARRY,
    PREDICT,
    RESTING_COLUMNS,
    max_cache_devices,
    split_by_form,
    table_degrees,
    unit_values,
)
from shardwise.sharding import CollectiveKind
from shardwise.step.inference_kernels import TOUCHED, PassKernel
from shardwise.step.instructions import UnitCollective
from shardwise.values import SymbolValues, Value, maximum

EXPERTS, VOCABULARY, NORM = "experts", "vocabulary", "norm"
HEAD = "head"
# Elements that a device sends per element of the payload (`Collective.payload_elements`), by the number of devices of the group.
SENT_PER_ELEMENT: Mapping[CollectiveKind, Any] = {
    CollectiveKind.ALL_REDUCE: lambda degree: 2 * (degree - 1) / degree,
    CollectiveKind.ALL_GATHER: lambda degree: (degree - 1) / degree,
    CollectiveKind.REDUCE_SCATTER: lambda degree: (degree - 1) / degree,
    CollectiveKind.ALL_TO_ALL: lambda degree: (degree - 1) / degree,
    CollectiveKind.SEND_RECV: lambda degree: np.where(degree > 1, 1.0, 0.0),
}
ALL_REDUCE, EXCHANGE = "all_reduce", "exchange"


@dataclass(frozen=True, slots=True, kw_only=True)
class PassLengths:
    """Lengths that passes of a table have in common: a decoding sequence adds `tokens_per_sequence` tokens (1, and those
    drafted) to
    `decode_context` in the cache; an input has `prompt_tokens`, of which `cached_tokens` were in the cache before."""

    decode_context: float
    prompt_tokens: float
    tokens_per_sequence: int = 1
    cached_tokens: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSums:
    """Sums over kernels: products by group of weights, FLOPs and elements of the others."""

    products: Mapping[str, Products]
    flops: Column = 0.0
    cache_elements: Column = 0.0
    state_elements: Column = 0.0
    activation_elements: Column = 0.0

    def take(self, rows: Any) -> KernelSums:
        """Return the sums of some rows."""
        products = {group: Products(part.elements[rows], part.flops[rows]) for group, part in self.products.items()}
        columns = {f.name: getattr(self, f.name)[rows] for f in fields(self) if f.name != "products"}
        return KernelSums(products=products, **columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableWork:
    """Parts of the passes of each row of a table; all columns have its length.

    `per_token` and `per_logit` run once over the tokens of a pass of one copy of attention and over the tokens whose logits are
    wanted, `per_sequence` for each decoding sequence, `per_chunk` for a chunk of `chunk_tokens`, of which an input has
    `num_chunks`; a pass has `batched_tokens` at most. Collectives are per token, per logit, per decoding sequence or per chunk.
    `cache_devices` share the sequences of a copy of attention. `chosen_share` of the experts is taken by a token.
    """

    per_token: KernelSums
    per_logit: KernelSums
    per_sequence: KernelSums
    per_chunk: KernelSums
    kernels: Mapping[str, Column]
    token_collectives: tuple[PassCollective, ...]
    logit_collectives: tuple[PassCollective, ...]
    sequence_collectives: tuple[PassCollective, ...]
    chunk_collectives: tuple[PassCollective, ...]
    cache_devices: Column
    chosen_share: Column
    attention_dp: Column
    splits_experts: Column
    chunk_tokens: Column
    num_chunks: Column
    batched_tokens: Column
    num_layers: Column
    tokens_per_sequence: Column
    cp: Column
    pp: Column

    @classmethod
    def of(cls, architecture: Architecture, table: ConfigurationTable, lengths: PassLengths) -> TableWork:
        """Return the work of a table, derived once for each of its layouts."""
        first, rows = table.distinct(LAYOUT_COLUMNS)
        layouts = table.take(first)
        parts = [
            (index, _LayoutWork(architecture, layouts.take(index), lengths, form).result())
            for form, index in split_by_form(layouts)
        ]
        order = np.argsort(np.concatenate([index for index, _ in parts]))
        return join_work([work for _, work in parts]).take(order[rows])

    def take(self, rows: Any) -> TableWork:
        """Return the work of some rows."""
        sums = {name: getattr(self, name).take(rows) for name in SUMS}
        columns = {name: np.asarray(getattr(self, name))[rows] for name in COLUMNS}
        collectives: dict[str, Any] = {
            name: tuple(
                PassCollective(c.kind, c.degree[rows], c.count[rows], c.elements[rows]) for c in getattr(self, name)
            )
            for name in COLLECTIVES
        }
        kernels = {name: column[rows] for name, column in self.kernels.items()}
        return TableWork(**sums, **columns, **collectives, kernels=kernels)

    def work(self, sequences: Column, routing: Routing, *, prompts: Column | None = None) -> PassWork:
        """Return the work of a pass of each row: `sequences` that decode in each copy of attention, and chunks of `prompts`
        inputs (None: a decode pass).

        Experts that no token takes are not read: of E with k for each token, n tokens take E (1 - (1 - k/E)^n) at uniform
        routing.
        """
        decoding = sequences * self.tokens_per_sequence
        chunks: Column = 0.0 if prompts is None else prompts
        # Of fewer sequences than devices that share them, some devices have one and the others none.
        placed = np.where(sequences > 0, np.maximum(sequences, self.cache_devices), 0.0)
        tokens = (decoding + self.chunk_tokens * chunks) / self.cp
        logits = decoding + chunks
        all_tokens = tokens * self.attention_dp
        products = {group: part.scaled(1.0, tokens) for group, part in self.per_token.products.items()}
        if EXPERTS in products:
            share = 1.0 - (1.0 - self.chosen_share) ** (all_tokens * routing.skew)
            imbalance = np.where(self.splits_experts, routing.imbalance, 1.0)
            products[EXPERTS] = self.per_token.products[EXPERTS].scaled(share, tokens * imbalance)
        parts = [(self.per_logit, logits, 1.0), (self.per_sequence, placed, np.minimum(sequences, 1.0))]
        parts += [(self.per_chunk, chunks, 1.0)] if prompts is not None else []
        for sums, rows, reads in parts:
            for group, part in sums.products.items():
                products[group] = products.get(group, NO_PRODUCTS) + part.scaled(reads, rows)
        sequence, chunk = self.per_sequence, self.per_chunk
        return PassWork(
            products=products,
            cache_elements=sequence.cache_elements * placed + chunk.cache_elements * chunks,
            decode_flops=sequence.flops * placed, prompt_flops=chunk.flops * chunks,
            state_elements=sequence.state_elements * placed + chunk.state_elements * chunks,
            activation_elements=self.per_token.activation_elements * tokens
            + sequence.activation_elements * placed
            + chunk.activation_elements * chunks,
            kernels=self.kernels,
            collectives=tuple(
                replace(collective, elements=collective.elements * rows)
                for collectives, rows in (
                    (self.token_collectives, tokens), (self.logit_collectives, logits), (self.sequence_collectives, placed),
                    (self.chunk_collectives if prompts is not None else (), chunks),
                )
                for collective in collectives
            ),
        )  # fmt: skip


SUMS = ("per_token", "per_logit", "per_sequence", "per_chunk")
COLLECTIVES = ("token_collectives", "logit_collectives", "sequence_collectives", "chunk_collectives")
COLUMNS = (
    "cache_devices", "chosen_share", "attention_dp", "splits_experts", "chunk_tokens", "num_chunks", "batched_tokens",
    "num_layers", "tokens_per_sequence", "cp", "pp",
)  # fmt: skip
LAYOUT_COLUMNS = (*RESTING_COLUMNS, "max_batched_tokens")  # columns that the work of a pass depends on


def join_work(parts: Sequence[TableWork]) -> TableWork:
    """Return the work of the rows of several tables, one after the other."""
    lengths = [len(part.pp) for part in parts]
    kernels = {name for part in parts for name in part.kernels}
    columns: dict[str, Any] = {name: _join_sums([getattr(part, name) for part in parts], lengths) for name in SUMS}
    columns |= {name: np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS}
    columns |= {name: _join_collectives([getattr(part, name) for part in parts], lengths) for name in COLLECTIVES}
    joined = {name: join_columns([part.kernels.get(name, 0.0) for part in parts], lengths) for name in kernels}
    return TableWork(**columns, kernels=joined)


def join_columns(columns: Sequence[Any], lengths: Sequence[int]) -> Floats:
    """Return columns one after the other; a number stands for a column of this length."""
    return np.concatenate([np.zeros(length) + column for column, length in zip(columns, lengths, strict=True)])


def _join_sums(parts: Sequence[KernelSums], lengths: Sequence[int]) -> KernelSums:
    groups = {group for part in parts for group in part.products}
    products = {
        group: Products(
            *(
                join_columns(
                    [getattr(part.products[group], name) if group in part.products else 0.0 for part in parts], lengths
                )
                for name in ("elements", "flops")
            )
        )
        for group in groups
    }
    names = (field.name for field in fields(KernelSums) if field.name != "products")
    return KernelSums(
        products=products, **{name: join_columns([getattr(part, name) for part in parts], lengths) for name in names}
    )


def _join_collectives(
    parts: Sequence[tuple[PassCollective, ...]], lengths: Sequence[int]
) -> tuple[PassCollective, ...]:
    """Return collectives of one kind and order in their parts; degrees of 1 where a part has fewer."""
    kinds = [part[position].kind for part in parts for position in range(len(part))]
    joined = []
    for kind in dict.fromkeys(kinds):
        of_kind = [[c for c in part if c.kind == kind] for part in parts]
        for position in range(max(map(len, of_kind))):
            columns = [
                (c.degree, c.count, c.elements)
                if (c := members[position] if position < len(members) else None)
                else (1, 0, 0)
                for members in of_kind
            ]
            joined.append(
                PassCollective(kind, *(join_columns([column[i] for column in columns], lengths) for i in range(3)))
            )
    return tuple(joined)


class _UnitPart(NamedTuple):
    """Kernels and collectives of a unit with the values of their symbols, for so many `rows` of a copy of attention (tokens or
    sequences): as many as devices share them, so that each has a whole one."""

    unit: PassUnit
    kernels: Sequence[PassKernel]
    collectives: Sequence[UnitCollective]
    values: SymbolValues
    rows: Value


class _LayoutWork:
    """Sums over the units of a model for each layout."""

    def __init__(
        self, architecture: Architecture, table: ConfigurationTable, lengths: PassLengths, form: PassForm
    ) -> None:
        self.architecture, self.table, self.lengths = architecture, table, lengths
        self.inference: InferencePass = inference_pass(architecture, form)
        self.degrees = table_degrees(architecture, table)
        self.copies = table.attention_dp
        # Devices of a copy of attention that share its tokens on their way to experts.
        self.slices = SymbolValues(self.degrees).group_degree(TOKEN_SLICE_AXES if form.dispatch == "all_to_all" else ())
        self.new_tokens = lengths.prompt_tokens - lengths.cached_tokens
        self.num_chunks = np.ceil(self.new_tokens / np.minimum(table.max_batched_tokens, self.new_tokens))
        # Whole tokens for each device of cp, so that parts of a chunk are even.
        self.chunk = np.maximum(np.round(self.new_tokens / self.num_chunks / table.cp), 1) * table.cp
        self.decode = SequenceGroup(
            kind=DECODE, num_seqs=self.copies, new_tokens=lengths.tokens_per_sequence, cached_tokens=lengths.decode_context,
            num_logits=lengths.tokens_per_sequence,
        )  # fmt: skip
        self.prefill = SequenceGroup(
            kind=PREFILL, num_seqs=self.copies, new_tokens=self.chunk,
            cached_tokens=lengths.cached_tokens + (self.new_tokens - self.chunk) / 2,
        )  # fmt: skip

    def result(self) -> TableWork:
        units = [unit for unit in self.inference.units if unit.name not in (PREDICT, CARRY)]
        layers, head = [u for u in units if u.name != HEAD], [u for u in units if u.name == HEAD]
        zeros = np.zeros(len(self.table))
        arch = self.architecture
        tokens, logits = self._token_parts(layers), self._token_parts(head)
        # A chunk is of one sequence, which one of the devices that share these has whole: it counts as one row.
        sequences = self._group_parts(layers, self.decode)
        chunks = [part._replace(rows=1) for part in self._group_parts(layers, self.prefill)]
        return TableWork(
            per_token=self._sum_kernels(tokens), per_logit=self._sum_kernels(logits),
            per_sequence=self._sum_kernels(sequences), per_chunk=self._sum_kernels(chunks),
            kernels={name: count + zeros for name, count in count_kernels(units).items()},
            token_collectives=self._sum_collectives(tokens), logit_collectives=self._sum_collectives(logits),
            sequence_collectives=self._sum_collectives(sequences), chunk_collectives=self._sum_collectives(chunks),
            cache_devices=zeros + reduce(maximum, [part.rows for part in sequences], 1),
            chosen_share=zeros + (
                arch.experts_per_token / (arch.num_experts + self.table.redundant_experts) if arch.num_experts else 0.0
            ),
            attention_dp=self.copies + zeros, splits_experts=self.table.ep > 1, chunk_tokens=self.chunk + zeros,
            num_chunks=self.num_chunks + zeros, batched_tokens=self.table.max_batched_tokens + zeros,
            num_layers=arch.num_layers + zeros,
            tokens_per_sequence=self.lengths.tokens_per_sequence + zeros, cp=self.table.cp + zeros, pp=self.table.pp + zeros,
        )  # fmt: skip

    def _token_parts(self, units: Sequence[PassUnit]) -> list[_UnitPart]:
        """Return the parts of units that run once over the tokens of a pass, with tokens of each copy of attention on every
        device of cp."""
        values = {"B": self.copies, "T": self.table.cp * self.slices, "j": self.slices, TOUCHED: 1.0}
        return [
            _UnitPart(unit, unit.token_kernels, unit.token_collectives, self._values(unit, values), self.slices)
            for unit in units
        ]

    def _group_parts(self, units: Sequence[PassUnit], group: SequenceGroup) -> list[_UnitPart]:
        """Return the parts of units that run for the sequences of a group."""
        parts = []
        for unit in units:
            rows = max_cache_devices(unit, SymbolValues(self.degrees))
            values = self._group_values(unit, replace(group, num_seqs=group.num_seqs * rows))
            parts.append(
                _UnitPart(unit, unit.group_kernels[group.kind], unit.group_collectives[group.kind], values, rows)
            )
        return parts

    def _group_values(self, unit: PassUnit, group: SequenceGroup) -> SymbolValues:
        slots, seen = slots_of_group(group, unit.window, unit.window_kind)
        values = {"B": group.num_seqs, "T": group.new_tokens, SLOTS: slots, SPAN: seen / slots, "j": group.num_logits}
        layer = self.architecture.unit_architecture(unit.name)
        if layer.index_topk:
            values["s"] = num_selected(layer, seen)
        return self._values(unit, values)

    def _values(self, unit: PassUnit, values: Mapping[str, Value]) -> SymbolValues:
        return unit_values(self.architecture, unit, self.table, {**self.degrees, **values})

    def _sum_kernels(self, parts: Iterable[_UnitPart]) -> KernelSums:
        """Return the sums over kernels for one row."""
        zeros = np.zeros(len(self.table))
        products: dict[str, Products] = defaultdict(lambda: Products(zeros, zeros))
        sums: dict[str, Column] = defaultdict(lambda: zeros)
        for unit, kernels, _, values, rows in parts:
            for kernel in kernels:
                flops = unit.count * kernel.kernel.flops.evaluate(values) / rows
                group = product_group(kernel)
                if group is not None:
                    elements = unit.count * kernel.weights[group].evaluate(values)
                    products[group] = products[group] + Products(elements, flops)
                    continue
                sums["flops"] = sums["flops"] + flops
                for role, elements in kernel.kernel.elements.items():
                    name = ELEMENT_SUMS.get(role, "activation_elements")
                    sums[name] = sums[name] + unit.count * elements.evaluate(values) / rows
        names = (f.name for f in fields(KernelSums) if f.name != "products")
        return KernelSums(products=dict(products), **{name: sums[name] for name in names})

    def _sum_collectives(self, parts: Iterable[_UnitPart]) -> tuple[PassCollective, ...]:
        """Return the collectives of one row by kind and group of devices; those of cp alone are left out."""
        sums: dict[tuple[str, tuple[str, ...]], list[Column]] = {}
        zeros = np.zeros(len(self.table))
        for unit, _, collectives, values, rows in parts:
            for collective in collectives:
                if set(collective.axes) <= {"cp"}:
                    continue
                degree = values.group_degree(collective.axes)
                kind = ALL_REDUCE if collective.kind is CollectiveKind.ALL_REDUCE else EXCHANGE
                count, elements, _ = sums.setdefault((kind, collective.axes), [zeros, zeros, degree + zeros])
                sent = sent_elements(collective, values, degree)
                sums[kind, collective.axes][:2] = [
                    count + unit.count * (degree > 1), elements + unit.count * sent / rows
                ]  # fmt: skip
        return tuple(
            PassCollective(kind, degree, count, elements) for (kind, _), (count, elements, degree) in sums.items()
        )


ELEMENT_SUMS: Mapping[Role, str] = {Role.CACHE: "cache_elements", Role.RECURRENT_STATE: "state_elements"}


def sent_elements(collective: UnitCollective, values: SymbolValues, degree: Value) -> Column:
    """Return the elements that each device sends in a collective."""
    sent: Column = collective.elements.evaluate(values) * SENT_PER_ELEMENT[collective.kind](degree)
    return sent


def product_group(kernel: PassKernel) -> str | None:
    """Return the group of weights of a product; None for kernels whose weights, if any, are vectors."""
    groups = [group for group in kernel.weights if group != NORM]
    return groups[0] if kernel.kernel.kind == "contract" and groups else None


def count_kernels(units: Iterable[PassUnit]) -> dict[str, float]:
    """Return the launches of a decode pass by class: of layers, of experts, of indexers, of recurrences; and `casts`, products
    whose inputs are cast where weights are narrow."""
    counts: dict[str, float] = defaultdict(float)
    for unit in units:
        for kernel in (*unit.token_kernels, *unit.group_kernels[DECODE]):
            counts[_kernel_class(kernel)] += unit.count
            counts["casts"] += unit.count * (product_group(kernel) in ("attention", "mlp", "recurrence"))
    return dict(counts)


def _kernel_class(kernel: PassKernel) -> str:
    kind = kernel.kernel.kind
    if EXPERTS in kernel.weights or Role.ROUTED in kernel.kernel.elements or kind == "route":
        return "experts"
    if kind == "select":
        return "indexer"
    return "recurrence" if kind == "recurrence" or ("recurrence" in kernel.weights and kernel.by_sequence) else "layer"
