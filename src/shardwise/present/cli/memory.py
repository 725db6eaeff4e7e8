"""`shardwise memory`: what fills the devices under one layout or several, stage by stage."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shardwise.model import DEFAULT_SEQ_LEN
from shardwise.present.cli.arguments import (
    add_job_arguments,
    add_output_arguments,
    layout_help,
    parse_layout_text,
    resolve,
)
from shardwise.present.cli.pictures import picture_name, write_picture
from shardwise.price import Problem
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.layout import Layout
    from shardwise.model import Architecture, Job
    from shardwise.present.cli.section import Report

BATCH = "micro-batches that fill the pipeline, for every replica"

DESCRIPTION = "What fills the devices under one layout, or several side by side: by term, stage by stage."
EXAMPLES = (
    'shardwise memory llama-3-8b h100:8 --layout "fsdp=8 micro_batch_seqs=2" --plot memory.svg',
    'shardwise memory llama-3-8b h100:8 --layout "tp=8" --layout "fsdp=8 recompute=full" --seq-len 8Ki',
    'shardwise memory llama-3-8b h100:8 --layout "fsdp=8 recompute=budget:20GB" -v --plot-kept kept.svg',
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    add_job_arguments(parser, sizes=(BATCH, str(DEFAULT_SEQ_LEN)))
    job, output = parser.groups("job", "output")
    job.add_argument(
        "--layout", type=str, required=True, action="append", metavar="TEXT",
        help=f"{layout_help()}; may be repeated, to compare",
    )  # fmt: skip
    output.add_argument(
        "--plot", type=picture_name, metavar="FILE", help="draw the bars: of layouts, or of one layout's stages"
    )
    output.add_argument(
        "--plot-kept", type=picture_name, metavar="FILE",
        help="draw what a layer of the layout keeps for the backward pass and computes again, and what other sets would",
    )  # fmt: skip
    add_output_arguments(parser, verbose=True)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON."""
    from shardwise.present.cli.memory_report import memory_report
    from shardwise.search import memory_payload

    defaults = [name for name in ("seq_len", "batch_tokens") if not _is_given(arguments, name)]
    model, cluster, job = _resolve(arguments)
    model.require_positions(job.seq_len)
    layouts = parse_layouts(arguments.layout, model, job, full_batch="batch_tokens" in defaults)
    payload = memory_payload(model, cluster, layouts, defaults)
    if arguments.plot_kept:
        _plot_kept(model, cluster, layouts, arguments.plot_kept)
    if arguments.plot:
        _plot(payload, cluster, arguments.plot)
    return json.dumps(payload, indent=2) if arguments.json else memory_report(payload, BATCH)


def _resolve(arguments: argparse.Namespace) -> tuple[Architecture, Cluster, Job]:
    """Model, cluster and job; a sequence that is left out has the usual length."""
    from shardwise.search import default_seq_len

    asked = arguments.seq_len
    arguments.seq_len = str(DEFAULT_SEQ_LEN) if asked is None else asked
    found = resolve(arguments)
    if asked is None and default_seq_len(found[0]) != DEFAULT_SEQ_LEN:
        arguments.seq_len = str(default_seq_len(found[0]))
        return resolve(arguments)
    return found


def _is_given(arguments: argparse.Namespace, name: str) -> bool:
    key = {"seq_len": "job.seq_len", "batch_tokens": "job.global_batch_tokens"}[name]
    return getattr(arguments, name) is not None or any(text.partition("=")[0].strip() == key for text in arguments.set)


def parse_layouts(
    texts: Sequence[str], model: Architecture, job: Job, *, full_batch: bool = False
) -> list[tuple[Job, Layout]]:
    """Every layout with its job. Raises `InputError` with the problems of all."""
    from shardwise.values import InputError, raise_problems

    layouts: list[tuple[Job, Layout]] = []
    problems: list[str] = []
    for text in texts:
        try:
            own = _filling_job(text, job) if full_batch else job
            layouts.append((own, parse_layout_text(text, model, own)))
        except InputError as error:
            problems += error.problems
    raise_problems(problems)
    return layouts


def _filling_job(text: str, job: Job) -> Job:
    """The job with the smallest batch that fills a layout, whatever its text says that follows from the batch."""
    from shardwise.layout import DERIVED_FIELDS, layout_from_fields, parse_fields
    from shardwise.search import smallest_full_job

    found = parse_fields(text, prefix="--layout", extra_counts=DERIVED_FIELDS)
    return smallest_full_job(
        job, layout_from_fields({key: value for key, value in found.items() if key not in DERIVED_FIELDS})
    )


def _plot_kept(model: Architecture, cluster: Cluster, layouts: Sequence[tuple[Job, Layout]], target: str) -> None:
    from shardwise.present.draw.lines import draw_lines
    from shardwise.present.pictures.recompute_chart import kept_chart
    from shardwise.search.layout_memory import layout_memory
    from shardwise.values import InputError

    if len(layouts) > 1:
        raise InputError(f"--plot-kept: found {len(layouts)} layouts; one --layout is required")
    ((job, layout),) = layouts
    chosen = layout_memory(Problem(model, cluster, job), layout).layout
    write_picture("--plot-kept", target, draw_lines(kept_chart(Problem(model, cluster, job), chosen)))


def _plot(payload: Mapping[str, Any], cluster: Cluster, target: str) -> None:
    from shardwise.present.draw.bars import draw_bars
    from shardwise.present.pictures.book_figures import memory_chart

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
