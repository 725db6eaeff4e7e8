"""Values of symbols in each row of a table, by the form of its layout, and the elements that rest on a device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from shardwise.derive.inference_unit import ATTENTION_DP_AXES
from shardwise.layout.sharding_scheme import shared_kv_heads
from shardwise.model import Architecture, Role
from shardwise.serve.configuration_table import ConfigurationTable, Floats
from shardwise.serve.inference_pass import PassForm, PassUnit, axis_degrees, inference_pass, unit_dims
from shardwise.step.inference_kernels import CacheTensor
from shardwise.values import SymbolValues, Value, maximum

PREDICT, CARRY = "predict", "carry"
FORM_COLUMNS = ("dispatch", "cache_split", "ws")
# Columns that say what rests on a device.
RESTING_COLUMNS = ("tp", "attention_dp", "pp", "cp", "expert_tp", "redundant_experts", *FORM_COLUMNS)


def split_by_form(table: ConfigurationTable) -> Iterator[tuple[PassForm, NDArray[np.int64]]]:
    """Yield the forms of a table's layouts, each with its rows."""
    first, rows = table.distinct(FORM_COLUMNS)
    positions: dict[PassForm, list[int]] = defaultdict(list)
    for position, row in enumerate(first):
        positions[PassForm.of(table.layout_of(int(row)))].append(position)
    for form, members in positions.items():
        yield form, np.flatnonzero(np.isin(rows, members))


def table_degrees(architecture: Architecture, table: ConfigurationTable) -> dict[str, Value]:
    """Return the degrees of the axes of an instance, a column each."""
    return axis_degrees(
        shared_kv_heads(architecture), tp=table.tp, attention_dp=table.attention_dp, expert_tp=table.expert_tp, pp=table.pp,
        cp=table.cp, ws=table.ws,
    )  # fmt: skip


def unit_values(
    architecture: Architecture, unit: PassUnit, table: ConfigurationTable, values: Mapping[str, Value]
) -> SymbolValues:
    """Return the values of a unit's dims in each row, and others beside them."""
    return SymbolValues(
        {**unit_dims(architecture.unit_architecture(unit.name), table.redundant_experts), **values}
    )  # fmt: skip


def cache_devices_of(tensor: CacheTensor, degrees: SymbolValues) -> Value:
    """Return how many devices of a copy of attention share its sequences in a cache."""
    return degrees.group_degree(axis for axis in tensor.sequence_axes if axis not in ATTENTION_DP_AXES)


def max_cache_devices(unit: PassUnit, degrees: SymbolValues) -> Value:
    """Return how many devices share the sequences of a copy of attention, in the cache of a unit that most of them share."""
    return reduce(maximum, [cache_devices_of(tensor, degrees) for tensor in unit.cache], 1)


def weight_elements(architecture: Architecture, table: ConfigurationTable) -> dict[str, Floats]:
    """Return the elements of weights that rest on a device by group, over all layers; modules of multi-token prediction are not
    loaded unless tokens are drafted."""
    first, rows = table.distinct(RESTING_COLUMNS)
    sums: dict[str, Floats] = defaultdict(lambda: np.zeros(len(first)))
    for index, unit, values in _resting_units(architecture, table.take(first)):
        if unit.name in (PREDICT, CARRY):
            continue
        for group, elements in unit.weights.items():
            sums[group][index] += unit.count * elements.evaluate(values)
    return {group: elements[rows] for group, elements in sums.items()}


def request_elements(architecture: Architecture, table: ConfigurationTable, tokens: float) -> Floats:
    """Return the elements that a request of so many tokens keeps on a device: keys and values that windows reach, and states. Of
    devices that share sequences each has as many requests less."""
    first, rows = table.distinct(RESTING_COLUMNS)
    total = np.zeros(len(first))
    for index, unit, values in _resting_units(architecture, table.take(first)):
        if unit.name == PREDICT:
            continue
        slots = tokens if unit.window is None else min(tokens, unit.window)
        for tensor in unit.cache:
            # States rest in fp32: two elements of 16 bits.
            multiple = slots if tensor.grows else 2 if tensor.role is Role.RECURRENT_STATE else 1
            shared_by = cache_devices_of(tensor, values)
            total[index] += unit.count * multiple * tensor.slot_elements.evaluate(values) / shared_by
    return total[rows]


def _resting_units(
    architecture: Architecture, table: ConfigurationTable
) -> Iterator[tuple[NDArray[np.int64], PassUnit, SymbolValues]]:
    """Yield the units of each form with its rows, and the values of their dims and degrees."""
    for form, index in split_by_form(table):
        rows = table.take(index)
        degrees = table_degrees(architecture, rows)
        for unit in inference_pass(architecture, form).units:
            yield index, unit, unit_values(architecture, unit, rows, degrees)
