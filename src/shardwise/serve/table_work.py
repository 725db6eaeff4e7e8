"""Work of the passes of a table's rows, derived from a model's programs of inference.

All sizes are linear in the tokens of a pass, in its decoding sequences or in its logits, once lengths and degrees are fixed:
each is evaluated once for every layout of a table (`TableWork.of`), and a pass of any number of sequences is a sum of multiples
(`work`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from shardwise.derive.inference_unit import WIDTH_AXES
from shardwise.layout.sharding_scheme import shared_kv_heads
from shardwise.model import Architecture, Role
from shardwise.model.operations import SLOTS, SPAN
from shardwise.serve.configuration_table import ConfigurationTable, Floats
from shardwise.serve.inference_pass import (
    DECODE,
    PREFILL,
    GroupKind,
    InferencePass,
    PassUnit,
    SequenceGroup,
    axis_degrees,
    inference_pass,
    num_selected,
    slots_of_group,
)
from shardwise.serve.pass_work import NO_PRODUCTS, Column, PassCollective, PassWork, Products, Routing
from shardwise.sharding import CollectiveKind
from shardwise.step.inference_kernels import TOUCHED, PassKernel
from shardwise.step.instructions import UnitCollective
from shardwise.values import SymbolValues, Value

EXPERTS, VOCABULARY, NORM = "experts", "vocabulary", "norm"
PREDICT, HEAD, CARRY = "predict", "head", "carry"
# Elements that a device sends per element of the whole array, by the number of devices of the group.
SENT_PER_ELEMENT: Mapping[CollectiveKind, Any] = {
    CollectiveKind.ALL_REDUCE: lambda degree: 2 * (degree - 1) / degree,
    CollectiveKind.ALL_GATHER: lambda degree: (degree - 1) / degree,
    CollectiveKind.REDUCE_SCATTER: lambda degree: (degree - 1) / degree,
    CollectiveKind.ALL_TO_ALL: lambda degree: (degree - 1) / degree / degree,
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
    `num_chunks`. `token_collectives` are per token, `logit_collectives` per logit. `chosen_share` of the experts is taken by a
    token, `tokens_per_copy` counts the tokens of all copies for each of one. `prediction_share`: a module of multi-token
    prediction and its head over the model's passes.
    """

    per_token: KernelSums
    per_logit: KernelSums
    per_sequence: KernelSums
    per_chunk: KernelSums
    kernels: Mapping[str, Column]
    token_collectives: tuple[PassCollective, ...]
    logit_collectives: tuple[PassCollective, ...]
    chosen_share: Column
    attention_dp: Column
    splits_experts: Column
    chunk_tokens: Column
    num_chunks: Column
    num_layers: Column
    tokens_per_sequence: Column
    cp: Column
    pp: Column

    @classmethod
    def of(cls, architecture: Architecture, table: ConfigurationTable, lengths: PassLengths) -> TableWork:
        """Return the work of a table, derived once for each of its layouts."""
        keys = np.stack([table.tp, table.attention_dp, table.pp, table.cp, table.expert_tp, table.max_batched_tokens])
        _, first, rows = np.unique(keys, axis=1, return_index=True, return_inverse=True)
        return _LayoutWork(architecture, table.take(first), lengths).result().take(np.ravel(rows))

    def take(self, rows: Any) -> TableWork:
        """Return the work of some rows."""
        sums = {name: getattr(self, name).take(rows) for name in SUMS}
        columns = {name: np.asarray(getattr(self, name))[rows] for name in COLUMNS}
        return TableWork(
            **sums, **columns, kernels={name: column[rows] for name, column in self.kernels.items()},
            token_collectives=_take_collectives(self.token_collectives, rows),
            logit_collectives=_take_collectives(self.logit_collectives, rows),
        )  # fmt: skip

    def work(self, sequences: Column, routing: Routing, *, has_prompt: bool = False) -> PassWork:
        """Return the work of a pass of each row: `sequences` that decode in each copy of attention, and a chunk of an input.

        Experts that no token takes are not read: of E with k for each token, n tokens take E (1 - (1 - k/E)^n) at uniform
        routing.
        """
        decoding = sequences * self.tokens_per_sequence
        tokens = (decoding + (self.chunk_tokens if has_prompt else 0.0)) / self.cp
        logits = np.maximum(decoding, 1.0) if has_prompt else decoding
        all_tokens = tokens * self.attention_dp
        products = {group: part.scaled(1.0, tokens) for group, part in self.per_token.products.items()}
        if EXPERTS in products:
            share = 1.0 - (1.0 - self.chosen_share) ** (all_tokens * routing.skew)
            imbalance = np.where(self.splits_experts, routing.imbalance, 1.0)
            products[EXPERTS] = self.per_token.products[EXPERTS].scaled(share, tokens * imbalance)
        parts = [(self.per_logit, logits, 1.0), (self.per_sequence, sequences, np.minimum(sequences, 1.0))]
        parts += [(self.per_chunk, 1.0, 1.0)] if has_prompt else []
        for sums, rows, reads in parts:
            for group, part in sums.products.items():
                products[group] = products.get(group, NO_PRODUCTS) + part.scaled(reads, rows)
        chunk = self.per_chunk if has_prompt else None
        return PassWork(
            products=products,
            cache_elements=self.per_sequence.cache_elements * sequences + (chunk.cache_elements if chunk else 0.0),
            decode_flops=self.per_sequence.flops * sequences,
            prompt_flops=chunk.flops if chunk else 0.0,
            state_elements=self.per_sequence.state_elements * sequences + (chunk.state_elements if chunk else 0.0),
            activation_elements=self.per_token.activation_elements * tokens
            + self.per_sequence.activation_elements * sequences
            + (chunk.activation_elements if chunk else 0.0),
            kernels=self.kernels,
            collectives=tuple(
                replace(collective, elements=collective.elements * rows)
                for collectives, rows in ((self.token_collectives, tokens), (self.logit_collectives, logits))
                for collective in collectives
            ),
        )  # fmt: skip


SUMS = ("per_token", "per_logit", "per_sequence", "per_chunk")
COLUMNS = (
    "chosen_share", "attention_dp", "splits_experts", "chunk_tokens", "num_chunks", "num_layers", "tokens_per_sequence", "cp",
    "pp",
)  # fmt: skip


def _take_collectives(collectives: Iterable[PassCollective], rows: Any) -> tuple[PassCollective, ...]:
    return tuple(PassCollective(c.kind, c.degree[rows], c.count[rows], c.elements[rows]) for c in collectives)


class _LayoutWork:
    """Sums over the units of a model for each layout."""

    def __init__(self, architecture: Architecture, table: ConfigurationTable, lengths: PassLengths) -> None:
        self.architecture, self.table, self.lengths = architecture, table, lengths
        self.inference: InferencePass = inference_pass(architecture)
        self.degrees = table_degrees(architecture, table)
        self.copies = table.attention_dp
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
        return TableWork(
            per_token=self._sum_kernels((unit, unit.token_kernels, self._token_values(unit)) for unit in layers),
            per_logit=self._sum_kernels((unit, unit.token_kernels, self._token_values(unit)) for unit in head),
            per_sequence=self._sum_group(layers, DECODE, self.decode),
            per_chunk=self._sum_group(layers, PREFILL, self.prefill),
            kernels={name: count + zeros for name, count in count_kernels(units).items()},
            token_collectives=self._collectives(layers), logit_collectives=self._collectives(head),
            chosen_share=zeros + (arch.experts_per_token / arch.num_experts if arch.num_experts else 0.0),
            attention_dp=self.copies + zeros, splits_experts=self.table.ep > 1, chunk_tokens=self.chunk + zeros,
            num_chunks=self.num_chunks + zeros, num_layers=arch.num_layers + zeros,
            tokens_per_sequence=self.lengths.tokens_per_sequence + zeros, cp=self.table.cp + zeros, pp=self.table.pp + zeros,
        )  # fmt: skip

    def _sum_group(self, units: Sequence[PassUnit], kind: GroupKind, group: SequenceGroup) -> KernelSums:
        return self._sum_kernels((unit, unit.group_kernels[kind], self._group_values(unit, group)) for unit in units)

    def _token_values(self, unit: PassUnit) -> SymbolValues:
        """Return the values for one token of each copy of attention on every device of cp."""
        return self._values(unit, {"B": self.copies, "T": self.table.cp, "j": 1, TOUCHED: 1.0})

    def _group_values(self, unit: PassUnit, group: SequenceGroup) -> SymbolValues:
        slots, seen = slots_of_group(group, unit.window, unit.window_kind)
        values = {"B": group.num_seqs, "T": group.new_tokens, SLOTS: slots, SPAN: seen / slots, "j": group.num_logits}
        layer = self.architecture.unit_architecture(unit.name)
        if layer.index_topk:
            values["s"] = num_selected(layer, seen)
        return self._values(unit, values)

    def _values(self, unit: PassUnit, values: Mapping[str, Value]) -> SymbolValues:
        dims = self.architecture.unit_architecture(unit.name).dims
        return SymbolValues({**dims, **self.degrees, **values})

    def _sum_kernels(self, parts: Iterable[tuple[PassUnit, Sequence[PassKernel], SymbolValues]]) -> KernelSums:
        zeros = np.zeros(len(self.table))
        products: dict[str, Products] = defaultdict(lambda: Products(zeros, zeros))
        sums: dict[str, Column] = defaultdict(lambda: zeros)
        for unit, kernels, values in parts:
            for kernel in kernels:
                flops = unit.count * kernel.kernel.flops.evaluate(values)
                group = product_group(kernel)
                if group is not None:
                    elements = unit.count * kernel.weights[group].evaluate(values)
                    products[group] = products[group] + Products(elements, flops)
                    continue
                sums["flops"] = sums["flops"] + flops
                for role, elements in kernel.kernel.elements.items():
                    name = ELEMENT_SUMS.get(role, "activation_elements")
                    sums[name] = sums[name] + unit.count * elements.evaluate(values)
        names = (f.name for f in fields(KernelSums) if f.name != "products")
        return KernelSums(products=dict(products), **{name: sums[name] for name in names})

    def _collectives(self, units: Iterable[PassUnit]) -> tuple[PassCollective, ...]:
        """Return the collectives by group of devices, per token or logit; those of cp alone are left out of both."""
        sums: dict[tuple[str, tuple[str, ...]], list[Column]] = {}
        zeros = np.zeros(len(self.table))
        for unit in units:
            values = self._token_values(unit)
            for collective in unit.token_collectives:
                if set(collective.axes) <= {"cp"}:
                    continue
                degree = values.group_degree(collective.axes)
                kind = ALL_REDUCE if collective.kind is CollectiveKind.ALL_REDUCE else EXCHANGE
                count, elements, _ = sums.setdefault((kind, collective.axes), [zeros, zeros, degree + zeros])
                sent = sent_elements(collective, values, degree)
                sums[kind, collective.axes][:2] = [
                    count + unit.count * (degree > 1), elements + unit.count * sent
                ]  # fmt: skip
        return tuple(
            PassCollective(kind, degree, count, elements) for (kind, _), (count, elements, degree) in sums.items()
        )


ELEMENT_SUMS: Mapping[Role, str] = {Role.CACHE: "cache_elements", Role.RECURRENT_STATE: "state_elements"}


def table_degrees(architecture: Architecture, table: ConfigurationTable) -> dict[str, Value]:
    """Return the degrees of the axes of an instance, a column each."""
    degrees = axis_degrees(
        shared_kv_heads(architecture), tp=table.tp, attention_dp=table.attention_dp, expert_tp=table.expert_tp, pp=table.pp,
        cp=table.cp,
    )  # fmt: skip
    return {**degrees, WIDTH_AXES[0]: 1}


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


def weight_elements(architecture: Architecture, table: ConfigurationTable) -> dict[str, Floats]:
    """Return the elements of weights that rest on a device by group, over all layers; modules of multi-token prediction are not
    loaded unless tokens are drafted."""
    sums: dict[str, Floats] = defaultdict(lambda: np.zeros(len(table)))
    degrees = table_degrees(architecture, table)
    for unit in inference_pass(architecture).units:
        if unit.name in (PREDICT, CARRY):
            continue
        values = SymbolValues({**architecture.unit_architecture(unit.name).dims, **degrees})
        for group, elements in unit.weights.items():
            sums[group] = sums[group] + unit.count * elements.evaluate(values)
    return dict(sums)


def request_elements(architecture: Architecture, table: ConfigurationTable, tokens: float) -> Floats:
    """Return the elements that a request of so many tokens keeps on a device: keys and values that windows reach, and states."""
    total = np.zeros(len(table))
    degrees = table_degrees(architecture, table)
    for unit in inference_pass(architecture).units:
        if unit.name == PREDICT:
            continue
        values = SymbolValues({**architecture.unit_architecture(unit.name).dims, **degrees})
        slots = tokens if unit.window is None else min(tokens, unit.window)
        for tensor in unit.cache:
            # States rest in fp32: two elements of 16 bits.
            multiple = slots if tensor.grows else 2 if tensor.role is Role.RECURRENT_STATE else 1
            total = total + unit.count * multiple * tensor.slot_elements.evaluate(values)
    return total
