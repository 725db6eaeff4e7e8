"""`memory`: what fills the devices; `kv-cache`: what the keys and values of a model take."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Unpack, overload

from shardwise import price, search
from shardwise.book_formulas.kv_cache import KvCache, KvCacheSizes, size_kv_cache
from shardwise.hardware import load_cluster
from shardwise.layout import Layout, parse_layout_shape, parse_layout_text
from shardwise.model import Architecture, Job, load_model
from shardwise.model.load import override_architecture
from shardwise.present import charts
from shardwise.present.arguments import ClusterName, JobFields, Layouts, Model, overrides_argument
from shardwise.present.exports import picture
from shardwise.present.verb import Argument, verb
from shardwise.values import (
    InputError,
    apply_overrides,
    argument_label,
    parse_count,
    parse_overrides,
    raise_problems,
    run_all,
)

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.price import ProblemInputs
    from shardwise.search import LayoutMemory, MemoryComparison

MAX_TOKENS = 10**18  # of a context and a batch of sequences


def _memory_chart(comparison: MemoryComparison) -> charts.Chart:
    return charts.memory_comparison_chart(comparison)


def _recompute_chart(comparison: MemoryComparison) -> charts.Chart:
    if len(comparison.layouts) > 1:
        raise InputError(f"--plot-kept: found {len(comparison.layouts)} layouts; one --layout is required")
    (memory,) = comparison.layouts
    return charts.kept_chart(price.Problem(comparison.model, comparison.cluster, memory.job), memory.layout)


@overload
def memory(
    model: Model, cluster: ClusterName, layout: str | Layout, job: Job | None = None, **fields: Unpack[JobFields]
) -> LayoutMemory: ...
@overload
def memory(
    model: Model, cluster: ClusterName, layout: list[str | Layout] | list[str] | None = None, job: Job | None = None,
    **fields: Unpack[JobFields],
) -> MemoryComparison: ...  # fmt: skip
@verb(
    description="What fills the devices under one layout, or several side by side: by term, stage by stage.",
    defaults={
        "global_batch_tokens": "micro-batches that fill the pipeline, for every replica",
        "seq_len": "4096",
        "layout": "the one that `plan` chooses",
    },
    examples=(
        'shardwise memory llama-3-8b h100:8 --layout "fsdp=8 micro_batch_seqs=2" --plot memory.svg',
        'shardwise memory llama-3-8b h100:8 --layout "tp=8" --layout "fsdp=8 recompute=full" --seq-len 8Ki',
        'shardwise memory llama-3-8b h100:8 --layout "fsdp=8 recompute=budget:20GB" -v --plot-kept kept.svg',
    ),
    exports=(
        picture("--plot", "draw the bars: of layouts, or of one layout's stages", _memory_chart),
        picture(
            "--plot-kept",
            "draw what a layer of the layout keeps for the backward pass and computes again, and what other sets would",
            _recompute_chart,
        ),
    ),
    group_order=("job", "cluster", "output"),
    has_details=True,
)
def memory(
    model: Model, cluster: ClusterName, layout: Layouts = None, job: Job | None = None, **fields: Unpack[JobFields]
) -> LayoutMemory | MemoryComparison:
    """Return the memory of a device of each pipeline stage under a layout, or under several, in bytes by term.

    `layout` is a layout or its text, a list of them, or None for the one that `plan` chooses. Without a job, sequences have 4,096
    tokens, or as many as the model has positions; the default batch is the smallest that fills the layout. Raises `InputError`
    for an unknown model or cluster, and with every rule that the layouts break.

    >>> import shardwise as sw
    >>> memory = sw.memory("llama-3-8b", "h100:8", "fsdp=8 micro_batch_seqs=2")
    >>> memory.job.global_batch_tokens, memory.fits, len(memory.stages)
    (65536, True, 1)
    >>> round(memory.stages[0]["parameters"] / 1e9, 2)  # 8.03B parameters of 2 bytes over 8 devices, in GB
    2.01
    >>> [layout.fits for layout in sw.memory("llama-3-8b", "h100:8", ["tp=8", "fsdp=8"]).layouts]
    [True, True]
    """
    layouts = [] if layout is None else [layout] if isinstance(layout, (str, Layout)) else list(layout)
    label, texts = argument_label("layout"), [text for text in layouts if isinstance(text, str)]
    inputs: ProblemInputs = run_all(
        lambda: price.resolve_problem(model, [cluster], job, fields),
        *(partial(parse_layout_shape, text, label) for text in texts),
    )[0]
    inputs.architecture.require_positions(inputs.job.seq_len)
    if layout is None:
        chosen = search.make_plan(inputs.problem).layout
        return search.compare_memory(inputs.problem, [(inputs.job, chosen)], [*inputs.default_names, "layout"])
    comparison = search.compare_memory(inputs.problem, _layouts_with_jobs(layouts, inputs), inputs.default_names)
    return comparison.layouts[0] if isinstance(layout, (str, Layout)) else comparison


def _layouts_with_jobs(layouts: Sequence[str | Layout], inputs: ProblemInputs) -> list[tuple[Job, Layout]]:
    """Return every layout with its job. Raises `InputError` with the problems of all."""
    pairs: list[tuple[Job, Layout]] = []
    problems: list[str] = []
    for layout in layouts:
        try:
            pairs.append(_layout_with_job(layout, inputs))
        except InputError as error:
            problems += error.problems
    raise_problems(problems)
    return pairs


def _layout_with_job(layout: str | Layout, inputs: ProblemInputs) -> tuple[Job, Layout]:
    """Return a layout and its job: a batch that is left out is the smallest that fills the layout."""
    label, job = argument_label("layout"), inputs.job
    if "global_batch_tokens" in inputs.defaults:
        job = search.smallest_full_job(job, parse_layout_shape(layout, label) if isinstance(layout, str) else layout)
    if isinstance(layout, str):
        return job, parse_layout_text(layout, inputs.architecture, job, label)
    return job, layout


@verb(
    description="What the keys and values of a model take: a token, a sequence, a batch; with --on how many sequences fit on a "
    "cluster beside the weights. Layers with a sliding window keep the window alone.",
    examples=(
        "shardwise kv-cache llama-3-70b --context 8Ki --batch 32",
        "shardwise kv-cache gemma-3-27b --context 128Ki --dtype int8 --on tpu-v5e:4x4 --weights int8",
        "shardwise kv-cache llama-3-70b --context 8Ki --on h100:8 --no-runtime",
    ),
    group_order=("job", "cluster", "output"),
)
def kv_cache(
    model: Model,
    context: Annotated[
        int | str,
        Argument(flag="--context", required=True, metavar="N", help="tokens of each sequence, such as 8Ki"),
    ],
    batch: Annotated[int | str, Argument(flag="--batch", metavar="N", help="sequences (default: 1)")] = 1,
    dtype: Annotated[
        str, Argument(flag="--dtype", metavar="NAME", help="format of keys and values (default: bf16)")
    ] = "bf16",
    cluster: Annotated[
        str | os.PathLike[str] | Cluster | None,
        Argument(
            flag="--on", group="cluster", metavar="CLUSTER", completes="clusters",
            help="CHIP:COUNT or CHIP:SHAPE, such as h100:8: say what fits there",
        ),
    ] = None,
    weights: Annotated[
        str,
        Argument(
            flag="--weights", group="cluster", metavar="NAME", help="with --on: format of the weights (default: bf16)"
        ),
    ] = "bf16",
    without_runtime: Annotated[
        bool,
        Argument(
            flag="--no-runtime", group="cluster",
            help="with --on: leave no memory to the runtime, as the books count",
        ),
    ] = False,
    overrides: Annotated[Sequence[str], overrides_argument("model or chip", "model.num_layers=64")] = (),
) -> KvCacheSizes:  # fmt: skip
    """Return the bytes of a model's key-value cache: of a token, a sequence and a batch; and how many sequences fit on a cluster.

    `without_runtime`: all memory of the cluster is for weights and caches, as the books count. Raises `InputError` for unknown
    names and for sizes out of range.

    >>> import shardwise as sw
    >>> sizes = sw.kv_cache("llama-3-70b", "8Ki", batch=32, cluster="h100:8")
    >>> sizes.bytes_per_token, sizes.fit.num_seqs
    (327680.0, 181)
    """
    changes = parse_overrides(overrides, ("model", "chip"))
    if changes["chip"] and cluster is None:
        raise InputError("--set: a chip is that of --on, which is missing; give a cluster, such as --on h100:8")
    if without_runtime and cluster is None:
        raise InputError(
            "--no-runtime: the runtime is that of --on, which is missing; give a cluster, such as --on h100:8"
        )
    architecture = model if isinstance(model, Architecture) else load_model(os.fspath(model))
    architecture = override_architecture(architecture, changes["model"])
    num_tokens = parse_count(context, label=argument_label("context"))
    num_seqs = parse_count(batch, label=argument_label("batch"))
    if max(num_tokens, num_seqs) > MAX_TOKENS:
        raise InputError(
            f"{argument_label('context')} and {argument_label('batch')}: found {num_tokens:.3g} and {num_seqs:.3g}; "
            f"at most {MAX_TOKENS:.0e} is required"
        )
    loaded_cluster = load_cluster(os.fspath(cluster)) if isinstance(cluster, (str, os.PathLike)) else cluster
    if loaded_cluster:
        chip = apply_overrides(loaded_cluster.chip, changes["chip"], "chip")
        loaded_cluster = replace(loaded_cluster, chip=chip)
    cache = KvCache(architecture=architecture, dtype=dtype)
    return size_kv_cache(cache, num_tokens, num_seqs, loaded_cluster, weights, runtime=not without_runtime)
