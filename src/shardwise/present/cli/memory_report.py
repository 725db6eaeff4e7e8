"""What fills the devices, as sections: the groups of each layout, and in detail their terms and the stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.present.cli.recompute_report import recompute_tables
from shardwise.present.cli.section import Marked, Report, Row, Section, Table, bar
from shardwise.values import format_bytes

# Terms of an estimate by what they are for, in the order of `values.estimate_term_names.MEMORY_TERMS`.
GROUPS = {
    "model state": ("parameters", "gradients", "master", "optimizer"),
    "activations": ("activations", "workspace"),
    "transient": ("gathered", "logits", "buffers"),
    "runtime": ("runtime",),
}


def memory_report(payload: Mapping[str, Any], default_batch: str) -> Report:
    """Several layouts side by side, then each; `default_batch` is what a batch that was left out is."""
    layouts = payload["layouts"]
    sections = [Section([_head(payload, default_batch)])]
    if len(layouts) > 1:
        sections.append(_side_by_side(layouts))
    for number, one in enumerate(layouts, start=1):
        sections += _layout(one, payload["memory_capacity_bytes"], f"[{number}]")
    return sections


def _head(payload: Mapping[str, Any], default_batch: str) -> str:
    """The job; what the user left out is said to be the default."""
    job, defaults = payload["job"], payload["defaults"]
    batches = {one["global_batch_tokens"] for one in payload["layouts"]}
    batch = f"{batches.pop():,} tokens per batch" if len(batches) == 1 else "a batch for each layout"
    batch += f" (default: {default_batch})" if "batch_tokens" in defaults else ""
    seq_len = f"sequences of {job['seq_len']:,}" + (" (default)" if "seq_len" in defaults else "")
    return f"memory of a device: {payload['model']['name']} on {payload['cluster']}, {batch}, {seq_len}, {job['precision']}"


def _side_by_side(layouts: Sequence[Mapping[str, Any]]) -> Section:
    """The fullest stages, a column for each layout."""
    fullest = [one["stages"][one["fullest_stage"]] for one in layouts]
    rows: list[Row] = [("", *(f"[{number}]" for number in range(1, len(layouts) + 1)))]
    rows += [
        (name, *(format_bytes(stage[name]) for stage in fullest))
        for name in fullest[0]
        if any(s[name] for s in fullest)
    ]
    rows.append(("total", *(format_bytes(one["memory_bytes"]) for one in layouts)))
    rows.append(("fits", *(Marked("yes", "good") if one["fits"] else Marked("NO", "bad") for one in layouts)))
    table = Table(rows=tuple(rows), right=range(1, len(layouts) + 1), indent=2)
    return Section([table], title="side by side (fullest stages)")


def _layout(one: Mapping[str, Any], capacity: float, mark: str) -> Iterator[Section]:
    stages, fullest = one["stages"], one["fullest_stage"]
    free = f"fits, {one['margin']:.0%} free" if one["fits"] else f"DOES NOT FIT, {-one['margin']:.0%} too much"
    held = Marked(
        f"  {format_bytes(one['memory_bytes'])} of {format_bytes(capacity)} ({free})", "good" if one["fits"] else "bad"
    )
    batch = (
        f"  batch of {one['global_batch_tokens']:,} tokens, micro-batches of each replica: {one['num_micro_batches']:,}"
    )
    where = f"  stage {fullest}, the fullest" if len(stages) > 1 else "  every device"
    yield Section([held, batch, where, _groups(stages[fullest])], title=f"{mark} {one['layout']['text']}")
    yield Section([_terms(stages[fullest])], title=f"{mark} by term", detail=True, name="each term")
    if len(stages) > 1:
        yield Section(
            [_stages(stages, capacity, fullest)],
            title=f"{mark} stages, of the capacity",
            detail=True,
            name="each stage",
        )
    yield Section(
        [*recompute_tables(one["recompute"])], title=f"{mark} kept for the backward pass, and computed again", detail=True,
        name="what each layer keeps and computes again",
    )  # fmt: skip


def _groups(memory: Mapping[str, float]) -> Table:
    held = {group: sum(memory[name] for name in names) for group, names in GROUPS.items()}
    return _bars(held, sum(memory.values()))


def _terms(memory: Mapping[str, float]) -> Table:
    return _bars({name: memory[name] for names in GROUPS.values() for name in names}, sum(memory.values()))


def _bars(held: Mapping[str, float], whole: float) -> Table:
    rows: tuple[Row, ...] = tuple(
        (name, format_bytes(value), f"{value / whole:.1%}", bar(value / whole, name))
        for name, value in held.items()
        if value
    )
    return Table(rows=rows, right=(1, 2), head=False, indent=4)


def _stages(stages: Sequence[Mapping[str, float]], capacity: float, fullest: int) -> Table:
    """A bar of the capacity for each stage; equal neighbours on one line."""
    rows: list[Row] = []
    first = 0
    while first < len(stages):
        last = first
        while last + 1 < len(stages) and stages[last + 1] == stages[first]:
            last += 1
        total = sum(stages[first].values())
        name = f"{first}" if first == last else f"{first} to {last}"
        mark = "<- fullest" if first <= fullest <= last else ""
        rows.append((name, format_bytes(total), f"{total / capacity:.1%}", bar(total / capacity), mark))
        first = last + 1
    return Table(rows=tuple(rows), right=(1, 2), head=False, indent=4)
