"""Candidates of a search: every factorisation of the devices over the axes, times the discrete choices, and their placements.

A *candidate* is a point of that product; legality rules say which are layouts. Columns of degrees are kept once per
factorisation; everything else is a small integer that indexes a list of choices. Of the placements of a factorisation those are
kept that no other placement beats on every link."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise.hardware import Cut, GroupLinks, Topology
from shardwise.layout import DEGREE_AXES, EXPERT_AXES, TP_AXES, Choices, Placement, cp_variant_names, cuts_by_axis
from shardwise.layout.choices import FACTORISED_AXES, GRID_CHOICES
from shardwise.layout.placement import searched_placements
from shardwise.layout.rules.layout_rule import LayoutRule, RuleContext
from shardwise.layout.rules.model_and_cluster_rules import has_even_batch, no_experts_problem
from shardwise.layout.rules.table import legal_modes, mode_context
from shardwise.layout.sharding_scheme import ZERO_AXES
from shardwise.model import Architecture, Job
from shardwise.values import NothingFitsError, Value, raise_problems

Ints = NDArray[np.int64]


class FamilyKey(NamedTuple):
    """Sequence parallelism, ZeRO stages and schedule, by index among the choices; `single` is 1 without a pipeline."""

    sequence_parallel: int
    zero_stages: tuple[int, ...]
    schedule: int
    single: int


@dataclass(frozen=True, slots=True)
class Space:
    """Legal candidates without placement and recompute: `degrees` by factorisation, and for each candidate indices into it and
    into the choices."""

    choices: Choices
    degrees: Mapping[str, Ints]
    factorisation: Ints
    sequence_parallel: Ints
    micro_batch: Ints
    virtual: Ints
    zero: Ints
    schedule: Ints
    num_candidates: int
    num_illegal_by_rule: Mapping[str, int]

    def even(self, job: Job) -> NDArray[np.bool_]:
        """Return a mask of candidates whose batch is a whole number of full micro-batches for each replica."""
        degrees: dict[str, Any] = {axis: self.degrees[axis][self.factorisation] for axis in ("dp", "fsdp")}
        degrees["micro_batch_seqs"] = np.array(self.choices.micro_batch_seqs, dtype=np.int64)[self.micro_batch]
        return np.asarray(has_even_batch(job, degrees))

    def families(self) -> dict[FamilyKey, Ints]:
        """Group candidates by structure; the first of those that differ only by their ZeRO stage represents all."""
        columns = (self.factorisation, self.sequence_parallel, self.micro_batch, self.virtual, self.schedule)
        changes = np.any([column[1:] != column[:-1] for column in columns], axis=0)
        first = np.concatenate([[0], np.flatnonzero(changes) + 1])
        # ZeRO stage is the last axis of the grid, so variants of a candidate are adjacent; a bit for each that is legal.
        stage_bits = np.add.reduceat(1 << self.zero, first)
        single = np.asarray(self.degrees["pp"] == 1)[self.factorisation[first]]
        sizes = (len(self.choices.sequence_parallel), 1 << len(self.choices.zero_stage), len(self.choices.schedule), 2)
        code = np.ravel_multi_index((self.sequence_parallel[first], stage_bits, self.schedule[first], single), sizes)
        families = {}
        for number in np.flatnonzero(np.bincount(code)):
            sp, bits, schedule, is_single = map(int, np.unravel_index(number, sizes))
            zeros = tuple(zero for zero in range(len(self.choices.zero_stage)) if bits >> zero & 1)
            families[FamilyKey(sp, zeros, schedule, is_single)] = first[code == number]
        return families


def factorisations(number: int, num_parts: int) -> Ints:
    """Return all ordered ways to write `number` as a product of `num_parts` factors, one a row."""
    divisors = np.array([d for d in range(1, int(number**0.5) + 1) if number % d == 0], dtype=np.int64)
    divisors = np.unique(np.concatenate([divisors, number // divisors]))
    rows = np.array([[number]], dtype=np.int64)
    for _ in range(num_parts - 1):
        remainder = rows[:, -1]
        picked, which = np.nonzero(remainder[:, None] % divisors[None, :] == 0)
        factor = divisors[which]
        rows = np.concatenate([rows[picked, :-1], factor[:, None], (remainder[picked] // factor)[:, None]], axis=1)
    return rows


def _degree_rows(architecture: Architecture, num_devices: int, choices: Choices) -> Ints:
    """Return the factorisations within the choices, each with every ep that divides its fsdp and the experts as a last column."""
    rows, num_experts = factorisations(num_devices, len(FACTORISED_AXES)), architecture.num_experts
    fsdp = rows[:, FACTORISED_AXES.index("fsdp")]
    divisors = [n for n in np.unique(fsdp).tolist() if num_experts % n == 0] if num_experts else [1]
    rows = np.concatenate([np.insert(rows[fsdp % n == 0], len(FACTORISED_AXES), n, axis=1) for n in divisors])
    return choices.filter_factorisations(rows)


def _expert_problems(architecture: Architecture, ep: int, etp: int | None) -> Iterator[str]:
    experts = architecture.num_experts
    if etp and not experts:
        yield f"pin: etp = {etp}: {architecture.name} has no experts; leave it out"
    if ep > 1 and not experts:
        yield f"pin: {no_experts_problem(architecture, ep)}"
    elif experts and experts % ep:
        possible = ", ".join(str(n) for n in range(1, experts + 1) if experts % n == 0)
        yield f"pin: ep = {ep} does not divide the {experts} experts of {architecture.name}; one of {possible} is required"


def build_space(architecture: Architecture, job: Job, num_devices: int, choices: Choices) -> Space:
    """Apply every rule to every candidate; a candidate counts under the first rule that it breaks.

    Raises `NothingFitsError` if no factorisation of the devices is within the limits, and `InputError` if ep is pinned to a
    degree that does not divide the model's experts."""
    raise_problems(list(_expert_problems(architecture, choices.pins.get("ep", 1), choices.etp)))
    rows = _degree_rows(architecture, num_devices, choices)
    if not len(rows):
        raise NothingFitsError(
            f"no legal layout: devices: dp·fsdp·tp·cp·pp cannot be {num_devices} with {choices}; "
            "every degree must divide the number of devices, and ep also fsdp and the experts"
        )
    columns, shape = _grid_columns(rows, choices)
    illegal: Counter[str] = Counter()
    indices: list[tuple[Ints, ...]] = []
    for number, schedule in enumerate(choices.schedule):
        # A candidate counts under the first rule that it breaks, so the order of the rules is visible in `num_illegal_by_rule`.
        context = RuleContext(architecture, job, num_devices, {**columns, "schedule": schedule})
        legal, broken = _apply_rules(choices.rules, context, shape)
        illegal.update(broken)
        illegal.update(_drop_without_mode(legal, context, choices))
        index = np.nonzero(legal)
        indices.append((*index, np.full(len(index[0]), number)))
    index = indices[0] if len(indices) == 1 else tuple(map(np.concatenate, zip(*indices, strict=True)))
    legal_rows, factorisation = np.unique(index[0], return_inverse=True)
    degrees = {axis: rows[legal_rows, i] for i, axis in enumerate(DEGREE_AXES)}
    num_policies = len(choices.policies)
    return Space(
        choices, degrees, factorisation, index[1], index[2], index[3], index[4], index[5],
        int(np.prod(shape)) * len(choices.schedule) * num_policies,
        {name: count * num_policies for name, count in illegal.items()},
    )  # fmt: skip


def _grid_columns(rows: Ints, choices: Choices) -> tuple[dict[str, Any], tuple[int, ...]]:
    """Return factorisations and choices as arrays that span the grid of candidates, and its shape."""
    columns: dict[str, Any] = {axis: rows[:, i].reshape(-1, 1, 1, 1, 1) for i, axis in enumerate(DEGREE_AXES)}
    for position, name in enumerate(GRID_CHOICES):
        along = [1] * 5
        along[position + 1] = -1
        columns[name] = np.array(getattr(choices, name), dtype=np.int64).reshape(along)
    # The rules judge the mode with the fewest requirements; `legal_modes` says where the others can run
    columns |= {"cp_variant": min(map(cp_variant_names().index, choices.cp_variant)), "async_tp": min(choices.async_tp)}
    columns["etp"] = columns["tp"]
    if len(choices.offload) == 1:
        columns["offload"] = choices.offload[0]
    shape = (len(rows), *(len(getattr(choices, name)) for name in GRID_CHOICES))
    return columns, shape


def explain_nearest_to_legal(architecture: Architecture, job: Job, num_devices: int, choices: Choices) -> str:
    """Describe the candidate that breaks the fewest rules, with the explanation of each, for choices without a legal layout."""
    rows = _degree_rows(architecture, num_devices, choices)
    columns, shape = _grid_columns(rows, choices)
    columns["schedule"] = choices.schedule[0]
    grid = RuleContext(architecture, job, num_devices, columns)
    num_broken = np.zeros(shape, dtype=np.int64)
    for rule in choices.rules:
        num_broken += np.logical_not(np.broadcast_to(rule.legal(grid), shape))
    num_broken += np.logical_not(np.broadcast_to(_has_mode(grid, choices, choices.mode_rules), shape))
    index = np.unravel_index(int(np.argmin(num_broken)), shape)
    candidate = {
        name: int(np.broadcast_to(column, shape)[index]) if np.ndim(column) else column
        for name, column in columns.items()
    }
    names = (*choices.pins, *choices.maxima, *(n for n in GRID_CHOICES if getattr(choices, n) != getattr(Choices(), n)))
    fields_text = " ".join(f"{name}={candidate[name]}" for name in dict.fromkeys((*DEGREE_AXES, *names)))
    nearest = replace(grid, degrees=candidate)
    broken_by_rule = {rule.name: rule.explain(nearest) for rule in choices.rules if not rule.legal(nearest)}
    if not _has_mode(nearest, choices, choices.mode_rules):
        broken_by_rule |= _explain_modes(nearest, choices)
    explanations = [f"  {name}: {text}" for name, text in broken_by_rule.items()]
    request_text = f" with {', '.join(dict.fromkeys(names))} as asked for" if names else ""
    return "\n".join([f"the nearest to one{request_text}, {fields_text}, breaks", *explanations])


def _apply_rules(
    rules: Sequence[LayoutRule], context: RuleContext, shape: tuple[int, ...]
) -> tuple[NDArray[np.bool_], dict[str, int]]:
    legal = np.ones(shape, dtype=bool)
    num_before = legal.size
    illegal: dict[str, int] = {}
    for rule in rules:
        passed = rule.legal(context)
        if not np.all(passed):
            legal &= passed
            num_legal = int(np.count_nonzero(legal))
            illegal[rule.name], num_before = num_before - num_legal, num_legal
    return legal, illegal


def _has_mode(context: RuleContext, choices: Choices, rules: Sequence[LayoutRule]) -> Value:
    """Return for one candidate, or for each of many, whether it can run in one of the modes of the choices."""
    modes = choices.modes(context.model)
    has_mode: Value = False
    for legal in legal_modes(context.model, context.job, context.degrees, modes, rules):
        has_mode = has_mode | legal
    return has_mode


def _drop_without_mode(legal: NDArray[np.bool_], context: RuleContext, choices: Choices) -> dict[str, int]:
    """Drop candidates that run in no mode; return how many, under the rule with which none is left."""
    rules, illegal = choices.mode_rules, dict[str, int]()
    if np.all(_has_mode(context, choices, rules)):
        return illegal
    for number, rule in enumerate(rules, start=1):
        num_before = int(np.count_nonzero(legal))
        legal &= _has_mode(context, choices, rules[:number])
        if num_dropped := num_before - int(np.count_nonzero(legal)):
            illegal[rule.name] = num_dropped
    return illegal


def _explain_modes(context: RuleContext, choices: Choices) -> dict[str, str]:
    """Return the explanations of the rules that one candidate breaks in the mode in which it breaks the fewest, by name."""
    broken_by_mode = []
    for mode in choices.modes(context.model):
        in_mode = mode_context(context.model, context.job, context.degrees, mode)
        broken_by_mode.append(
            {rule.name: rule.explain(in_mode) for rule in choices.mode_rules if not rule.legal(in_mode)}
        )
    return min((broken for broken in broken_by_mode if broken), key=len, default={})


# Groups whose links decide between placements: those that a derivation's collectives run over.
DECIDING_GROUPS = (TP_AXES, ("cp",), ZERO_AXES, ("dp",))
DECIDING_EXPERT_GROUPS = (EXPERT_AXES, TP_AXES + EXPERT_AXES, ("fsdp", *EXPERT_AXES, "cp"))


@dataclass(frozen=True, slots=True)
class PlacementTable:
    """One row for each factorisation and placement worth pricing: which they are, and the cuts of every axis."""

    placements: tuple[Placement, ...]
    factorisation: Ints
    placement: Ints
    cuts: Mapping[str, tuple[Cut, ...]]
    first: Ints  # for each factorisation, its first row here
    count: Ints  # and how many rows it has

    def links(self, topology: Topology, rows: Ints) -> GroupLinks:
        """Return the links of some rows, as arrays."""
        cuts = {
            axis: tuple(Cut(_take_rows(cut.size, rows), _take_rows(cut.stride, rows)) for cut in levels)
            for axis, levels in self.cuts.items()
        }
        return GroupLinks(topology, cuts)


def _take_rows(column: Value, rows: Ints) -> Value:
    return column[rows] if isinstance(column, np.ndarray) and column.ndim else column


def build_placement_table(topology: Topology, degrees: Mapping[str, Ints]) -> PlacementTable:
    """Cut every factorisation by every placement, and keep those that no other beats, one of each kind."""
    options = searched_placements(topology)
    count = len(degrees["pp"])
    cuts = [cuts_by_axis(topology, option, degrees) for option in options]
    prices = np.stack([_link_prices(topology, cut, count) for cut in cuts])
    keep = _undominated(prices)
    factorisation, placement = np.nonzero(keep.T)
    num_rows = np.bincount(factorisation, minlength=count)
    first = np.concatenate([[0], np.cumsum(num_rows)[:-1]])
    chosen = {
        axis: tuple(
            _select_cuts([cut[axis][i] for cut in cuts], placement, factorisation, count)
            for i in range(len(topology.levels))
        )
        for axis in cuts[0]
    }
    return PlacementTable(options, factorisation, placement, chosen, first, num_rows)


def _select_cuts(cuts: list[Cut], placement: Ints, factorisation: Ints, count: int) -> Cut:
    sizes = np.stack([np.broadcast_to(cut.size, count) for cut in cuts])
    strides = np.stack([np.broadcast_to(cut.stride, count) for cut in cuts])
    return Cut(sizes[placement, factorisation], strides[placement, factorisation])


def _link_prices(topology: Topology, cuts: Mapping[str, tuple[Cut, ...]], count: int) -> NDArray[np.float64]:
    """Return the quantities that decide between placements, of shape [count, 2 · (groups + 1)].

    They are seconds per byte and latency of each group, and of a hop along pp."""
    links = GroupLinks(topology, cuts)
    has_expert_axis = any(np.any(np.asarray(cut.size) > 1) for cut in cuts["ep"])
    groups = (*DECIDING_GROUPS, *(DECIDING_EXPERT_GROUPS if has_expert_axis else ()))
    deciding_links = [links.gather_link(group) for group in groups] + [links.neighbour_link(("pp",))]
    deciding_links += [link for group in groups if (link := links.all_reduce_link(group)) is not None]
    columns = [np.broadcast_to(x, count) for link in deciding_links for x in (link.seconds_per_byte, link.latency_s)]
    return np.stack(columns, axis=1)


def _undominated(prices: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which placements [placement, row] no other equals or beats on all prices; of equals the first stays."""
    num_options = len(prices)
    keep = np.ones(prices.shape[:2], dtype=bool)
    for worse in range(num_options):
        for better in range(num_options):
            if better == worse:
                continue
            beaten = np.all(prices[better] <= prices[worse], axis=1)
            if better > worse:
                beaten &= np.any(prices[better] < prices[worse], axis=1)
            keep[worse] &= ~(beaten & keep[better])
    return keep
