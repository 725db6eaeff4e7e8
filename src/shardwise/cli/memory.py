"""`shardwise memory`: what fills the devices under one layout or several, stage by stage."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.cli.arguments import add_job_arguments, layout_help, parse_layout_text, resolve
from shardwise.cli.pictures import picture_name, write_picture
from shardwise.job import USUAL_SEQ_LEN

if TYPE_CHECKING:
    from shardwise.cluster.cluster import Cluster
    from shardwise.job import Job
    from shardwise.layout.layout import Layout
    from shardwise.model.architecture import Architecture

BAR = 28
BATCH = "micro-batches that fill the pipeline, for every replica"
# Terms of an estimate by what they are for, in the order of `terms.MEMORY_TERMS`.
GROUPS = {
    "model state": ("parameters", "gradients", "master", "optimizer"),
    "activations": ("activations", "workspace"),
    "transient": ("gathered", "logits", "buffers"),
    "runtime": ("runtime",),
}


def configure(verbs: Any) -> None:
    """Declare the verb."""
    parser = verbs.add_parser(
        "memory", help="say what fills the devices under given layouts",
        description="What fills the devices under one layout, or several side by side: by term, stage by stage.",
    )  # fmt: skip
    add_job_arguments(parser, sizes=(BATCH, str(USUAL_SEQ_LEN)))
    parser.add_argument(
        "--layout", type=str, required=True, action="append", metavar="TEXT",
        help=f"{layout_help()}; may be repeated, to compare",
    )  # fmt: skip
    parser.add_argument(
        "--plot", type=picture_name, metavar="FILE", help="draw the bars: of layouts, or of one layout's stages"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> str:
    """The report, as text or as JSON."""
    from shardwise.planning.memory import memory_payload

    defaults = [name for name in ("seq_len", "batch_tokens") if not _is_given(arguments, name)]
    model, cluster, job = _resolve(arguments)
    model.require_positions(job.seq_len)
    layouts = parse_layouts(arguments.layout, model, job, full_batch="batch_tokens" in defaults)
    payload = memory_payload(model, cluster, layouts, defaults)
    if arguments.plot:
        _plot(payload, cluster, arguments.plot)
    return json.dumps(payload, indent=2) if arguments.json else memory_text(payload)


def _resolve(arguments: argparse.Namespace) -> tuple[Architecture, Cluster, Job]:
    """Model, cluster and job; a sequence that is left out has the usual length."""
    from shardwise.planning.memory import usual_seq_len

    asked = arguments.seq_len
    arguments.seq_len = str(USUAL_SEQ_LEN) if asked is None else asked
    found = resolve(arguments)
    if asked is None and usual_seq_len(found[0]) != USUAL_SEQ_LEN:
        arguments.seq_len = str(usual_seq_len(found[0]))
        return resolve(arguments)
    return found


def _is_given(arguments: argparse.Namespace, name: str) -> bool:
    key = {"seq_len": "job.seq_len", "batch_tokens": "job.global_batch_tokens"}[name]
    return getattr(arguments, name) is not None or any(text.partition("=")[0].strip() == key for text in arguments.set)


def parse_layouts(
    texts: Sequence[str], model: Architecture, job: Job, *, full_batch: bool = False
) -> list[tuple[Job, Layout]]:
    """Every layout with its job. Raises `InputError` with the problems of all."""
    from shardwise.errors import InputError, require

    layouts: list[tuple[Job, Layout]] = []
    problems: list[str] = []
    for text in texts:
        try:
            own = _filling_job(text, job) if full_batch else job
            layouts.append((own, parse_layout_text(text, model, own)))
        except InputError as error:
            problems += error.problems
    require(problems)
    return layouts


def _filling_job(text: str, job: Job) -> Job:
    """The job with the smallest batch that fills a layout, whatever its text says that follows from the batch."""
    from shardwise.layout.text import layout_of, parse_fields
    from shardwise.planning.codec import DERIVED
    from shardwise.planning.memory import filling_job

    found = parse_fields(text, what="--layout", also=DERIVED)
    return filling_job(job, layout_of({key: value for key, value in found.items() if key not in DERIVED}))


def memory_text(payload: Mapping[str, Any]) -> str:
    """Each layout's tree and stages; several side by side first."""
    sections = [_head(payload)]
    if len(payload["layouts"]) > 1:
        sections.append(_side_by_side(payload["layouts"]))
    sections += [_layout(one, payload["memory_capacity_bytes"], i + 1) for i, one in enumerate(payload["layouts"])]
    return "\n\n".join(sections)


def _head(payload: Mapping[str, Any]) -> str:
    """The job; what the user left out is said to be the default."""
    job, defaults = payload["job"], payload["defaults"]
    batches = {one["global_batch_tokens"] for one in payload["layouts"]}
    batch = f"{batches.pop():,} tokens per batch" if len(batches) == 1 else "a batch for each layout"
    default = f"default: {BATCH}"
    batch += f" ({default})" if "batch_tokens" in defaults else ""
    seq_len = f"sequences of {job['seq_len']:,}" + (" (default)" if "seq_len" in defaults else "")
    return f"memory of a device: {payload['model']['name']} on {payload['cluster']}, {batch}, {seq_len}, {job['precision']}"


def _side_by_side(layouts: Sequence[Mapping[str, Any]]) -> str:
    """The fullest stages, a column for each layout."""
    from shardwise.units import format_bytes

    fullest = [one["stages"][one["fullest_stage"]] for one in layouts]
    lines = [
        "side by side (fullest stages)",
        f"  {'':<12}" + "".join(f"{f'[{i + 1}]':>11}" for i in range(len(layouts))),
    ]
    for name in fullest[0]:
        if any(stage[name] > 0 for stage in fullest):
            lines.append(f"  {name:<12}" + "".join(f"{format_bytes(stage[name]):>11}" for stage in fullest))
    lines.append(f"  {'total':<12}" + "".join(f"{format_bytes(one['memory_bytes']):>11}" for one in layouts))
    lines.append(f"  {'fits':<12}" + "".join(f"{'yes' if one['fits'] else 'NO':>11}" for one in layouts))
    return "\n".join(lines)


def _layout(one: Mapping[str, Any], capacity: float, number: int) -> str:
    from shardwise.units import format_bytes

    stages, fullest = one["stages"], one["fullest_stage"]
    free = f"fits, {one['margin']:.0%} free" if one["fits"] else f"DOES NOT FIT, {-one['margin']:.0%} too much"
    lines = [
        f"[{number}] {one['layout']['text']}",
        f"  {format_bytes(one['memory_bytes'])} of {format_bytes(capacity)} ({free})",
        f"  batch of {one['global_batch_tokens']:,} tokens, micro-batches of each replica: {one['num_micro_batches']:,}",
    ]
    lines += ["", f"  stage {fullest}, the fullest" if len(stages) > 1 else "  every device", *_tree(stages[fullest])]
    if len(stages) > 1:
        lines += ["", "  stages", *_stages(stages, capacity, fullest)]
    return "\n".join(lines)


def _tree(memory: Mapping[str, float]) -> list[str]:
    """Groups and their terms, with bars of the whole."""
    lines = []
    for group, names in GROUPS.items():
        held = {name: memory[name] for name in names if memory[name] > 0}
        if held:
            lines.append(_row(f"    {group}", sum(held.values()), sum(memory.values())))
        if list(held) != [group]:
            lines += [_row(f"      {name}", value, sum(memory.values())) for name, value in held.items()]
    return lines


def _row(name: str, value: float, whole: float) -> str:
    from shardwise.units import format_bytes

    bar = "#" * max(1, round(BAR * value / whole))
    return f"{name:<20}{format_bytes(value):>10}  {value / whole:6.1%}  {bar}"


def _stages(stages: Sequence[Mapping[str, float]], capacity: float, fullest: int) -> list[str]:
    """A bar of the capacity for each stage; equal neighbours on one line."""
    from shardwise.units import format_bytes

    lines, first = [], 0
    while first < len(stages):
        last = first
        while last + 1 < len(stages) and stages[last + 1] == stages[first]:
            last += 1
        total = sum(stages[first].values())
        bar = "#" * max(1, round(BAR * total / capacity))
        name = f"{first}" if first == last else f"{first} to {last}"
        mark = "  <- fullest" if first <= fullest <= last else ""
        lines.append(f"    {name:<16}{format_bytes(total):>10}  {total / capacity:6.1%}  {bar}{mark}")
        first = last + 1
    return lines


def _plot(payload: Mapping[str, Any], cluster: Cluster, target: str) -> None:
    from shardwise.books.figures import memory_chart
    from shardwise.draw.bars import draw_bars

    layouts = payload["layouts"]
    title = f"Memory of {payload['model']['name']} on {payload['cluster']}"
    if len(layouts) == 1:
        only = layouts[0]
        subtitle = f"Bytes of one device of each stage: {only['layout']['text']}"
        bars = [(f"stage {i}", stage) for i, stage in enumerate(only["stages"])]
        bars = [("every device", only["stages"][0])] if len(bars) == 1 else bars
    else:
        subtitle = "Bytes of one device, of the fullest stage where there are several."
        bars = [
            (f"[{i + 1}] {one['layout']['text']}", one["stages"][one["fullest_stage"]]) for i, one in enumerate(layouts)
        ]
    write_picture("--plot", target, draw_bars(memory_chart(title, subtitle, bars, cluster.chip)))
