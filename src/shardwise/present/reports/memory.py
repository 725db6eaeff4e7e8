"""Reports of memory: what fills the devices, what recompute saves, the key-value cache of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from shardwise.present.rendering.numbers import num_bytes, seconds, share
from shardwise.present.rendering.report import Block, Line, Number, Report, Row, Section, Status, Table, share_bar
from shardwise.present.reports.wording import FIT_ANSWERS, tensor_names
from shardwise.price.device_memory import describe_margin
from shardwise.values import format_bytes, format_seconds

if TYPE_CHECKING:
    from shardwise.book_formulas.kv_cache import CacheFit, KvCacheSizes
    from shardwise.hardware import Cluster
    from shardwise.model import Architecture
    from shardwise.search import LayoutMemory, MemoryComparison
    from shardwise.search.recompute_budget import LayerRecompute

# Terms of an estimate by what they are for, in the order of `values.estimate_term_names.MEMORY_TERMS`.
GROUPS = {
    "model state": ("parameters", "gradients", "master", "optimizer"),
    "activations": ("activations", "workspace"),
    "transient": ("gathered", "logits", "buffers"),
    "runtime": ("runtime",),
}
DEFAULT_BATCH = "micro-batches that fill the pipeline, for every replica"
USUAL_BATCH = "usual for a model of this size"


def memory_report(comparison: MemoryComparison) -> Report:
    """Report several layouts side by side, then each; in detail its terms, its stages, and what its layers keep."""
    layouts = comparison.layouts
    sections = [Section([_head(comparison), *(f"  note: {note}" for note in comparison.model.config_notes)])]
    if len(layouts) > 1:
        sections.append(_side_by_side(layouts))
    for index, memory in enumerate(layouts):
        sections += _layout_sections(memory, f"[{index + 1}]", f"layouts.{index}")
    return sections


def _head(comparison: MemoryComparison) -> str:
    """Return the job; what the user left out is said to be the default."""
    defaults, job = comparison.defaults, comparison.layouts[0].job
    batches = {memory.job.global_batch_tokens for memory in comparison.layouts}
    batch = f"{batches.pop():,} tokens per batch" if len(batches) == 1 else "a batch for each layout"
    default_batch = USUAL_BATCH if "layout" in defaults else DEFAULT_BATCH
    batch += f" (default: {default_batch})" if "batch_tokens" in defaults else ""
    seq_len = f"sequences of {job.seq_len:,}" + (" (default)" if "seq_len" in defaults else "")
    chosen = "; the layout is the one that `plan` chooses" if "layout" in defaults else ""
    subject = f"{comparison.model.name} on {comparison.cluster.name}"
    return f"memory of a device: {subject}, {batch}, {seq_len}, {job.precision}{chosen}"


def _side_by_side(layouts: Sequence[LayoutMemory]) -> Section:
    """Return the fullest stages, a column for each layout."""
    fullest = [(memory.stages[memory.fullest_stage], memory.fullest_stage) for memory in layouts]
    rows: list[Row] = [("", *(f"[{number}]" for number in range(1, len(layouts) + 1)))]
    rows += [
        (
            name,
            *(
                num_bytes(stage[name], f"layouts.{index}.stages.{number}.{name}")
                for index, (stage, number) in enumerate(fullest)
            ),
        )
        for name in fullest[0][0]
        if any(stage[name] for stage, _ in fullest)
    ]
    totals = (num_bytes(memory.memory_bytes, f"layouts.{i}.memory_bytes") for i, memory in enumerate(layouts))
    rows.append(("total", *totals))
    rows.append(("fits", *(Status(*FIT_ANSWERS[memory.verdict]) for memory in layouts)))
    table = Table(rows=tuple(rows), right=range(1, len(layouts) + 1), indent=2)
    return Section([table], title="side by side (fullest stages)")


def _layout_sections(memory: LayoutMemory, mark: str, path: str) -> Iterator[Section]:
    stages, fullest, capacity = memory.stages, memory.fullest_stage, memory.memory_capacity_bytes
    free = describe_margin(memory.margin, memory.verdict)
    usage = Status(
        f"  {format_bytes(memory.memory_bytes)} of {format_bytes(capacity)} ({free})", FIT_ANSWERS[memory.verdict][1]
    )
    batch = f"  batch of {memory.job.global_batch_tokens:,} tokens, micro-batches of each replica: {memory.num_micro_batches:,}"
    where = f"  stage {fullest}, the fullest" if len(stages) > 1 else "  every device"
    stage, stage_path = stages[fullest], f"{path}.stages.{fullest}"
    yield Section([usage, batch, where, _group_bars(stage)], title=f"{mark} {memory.layout}")
    yield Section([_term_bars(stage, stage_path)], title=f"{mark} by term", detail=True, name="each term")
    if len(stages) > 1:
        table = _stage_table(stages, capacity, fullest)
        yield Section([table], title=f"{mark} stages, of the capacity", detail=True, name="each stage")
    yield Section(
        list(recompute_tables(memory.recompute, f"{path}.recompute")),
        title=f"{mark} kept for the backward pass, and computed again", detail=True,
        name="what each layer keeps and computes again",
    )  # fmt: skip


def _group_bars(memory: Mapping[str, float]) -> Table:
    groups = {group: num_bytes(sum(memory[name] for name in names)) for group, names in GROUPS.items()}
    return _bars(groups, sum(memory.values()))


def _term_bars(memory: Mapping[str, float], path: str) -> Table:
    terms = {name: num_bytes(memory[name], f"{path}.{name}") for names in GROUPS.values() for name in names}
    return _bars(terms, sum(memory.values()))


def _bars(sizes: Mapping[str, Number], total: float) -> Table:
    rows: tuple[Row, ...] = tuple(
        (name, size, share(size.value / total), share_bar(size.value / total, name))
        for name, size in sizes.items()
        if size.value
    )
    return Table(rows=rows, right=(1, 2), head=False, indent=4)


def _stage_table(stages: Sequence[Mapping[str, float]], capacity: float, fullest: int) -> Table:
    """Return a bar of the capacity for each stage; equal neighbours are on one line."""
    rows: list[Row] = []
    first = 0
    while first < len(stages):
        last = first
        while last + 1 < len(stages) and stages[last + 1] == stages[first]:
            last += 1
        total = sum(stages[first].values())
        name = f"{first}" if first == last else f"{first} to {last}"
        mark = "<- fullest" if first <= fullest <= last else ""
        rows.append((name, num_bytes(total), share(total / capacity), share_bar(total / capacity), mark))
        first = last + 1
    return Table(rows=tuple(rows), right=(1, 2), head=False, indent=4)


def recompute_tables(layers: Sequence[LayerRecompute], path: str) -> Iterator[Block]:
    """Yield for each kind of layer its tensors with their bytes and its kernels with their seconds; `path` is the list's."""
    for index, layer in enumerate(layers):
        kept_bytes = sum(tensor.num_bytes for tensor in layer.kept)
        recomputed_s = sum(kernel.seconds for kernel in layer.recomputed)
        yield Line(
            (
                f"  {layer.layer} ({layer.num_layers} layers), a layer in one micro-batch: ", num_bytes(kept_bytes), " kept, ",
                seconds(recomputed_s), " computed again",
            )
        )  # fmt: skip
        rows: list[Row] = [
            ("kept", tensor.tensor, num_bytes(tensor.num_bytes, f"{path}.{index}.kept.{number}.num_bytes"), "")
            for number, tensor in enumerate(layer.kept)
        ]
        rows += [
            (
                "again", f"{kernel.what} of {tensor_names(kernel.tensors)}",
                f"-{format_bytes(kernel.spared_bytes)}" if kernel.spared_bytes else "",
                Number(format_seconds(kernel.seconds), kernel.seconds, "s", f"{path}.{index}.recomputed.{number}.seconds"),
            )
            for number, kernel in enumerate(layer.recomputed)
        ]  # fmt: skip
        yield Table(rows=tuple(rows), right=(2, 3), head=False, indent=4)


ROW_FORMAT = "  {:<18}{:>9}   {}"


def cache_report(sizes: KvCacheSizes) -> Report:
    """Report what a token, a sequence and a batch take, and what fits on a cluster where one was named."""
    architecture = sizes.cache.architecture
    rows: list[Row] = [("a token", num_bytes(sizes.bytes_per_token, "bytes_per_token"), "")]
    if count := sizes.cache.num_recurrent_layers:
        states = num_bytes(sizes.cache.recurrent_state_bytes, "recurrent_state_bytes")
        rows.append(("recurrent states", states, f"of {count} layers, for a sequence of any length"))
    rows += [
        (
            "a sequence", num_bytes(sizes.sequence_bytes, "sequence_bytes"),
            f"of {sizes.context:,} tokens{_windows_text(sizes)}",
        ),
    ]  # fmt: skip
    if sizes.batch > 1:
        rows.append((f"{sizes.batch:,} sequences", num_bytes(sizes.batch * sizes.sequence_bytes, "batch_bytes"), ""))
    title = f"keys and values of {architecture.name} in {sizes.cache.dtype}"
    table = Table(rows=tuple(rows), right=(1,), head=False, indent=2, line=ROW_FORMAT)
    counts: Counter[str] = Counter()
    for layer, count in sizes.cache.layers:
        counts[_cached_per_token(layer)] += count
    lines = [f"  {count} layers of {text}" for text, count in counts.items()]
    head = Section([*lines, table], title=title)
    return [head, *([_fit_section(sizes, sizes.cluster, sizes.fit)] if sizes.cluster and sizes.fit else [])]


def _cached_per_token(architecture: Architecture) -> str:
    """Return what a layer keeps of a token: keys and values of its heads, or the latent that they come from."""
    heads, width = architecture.num_kv_heads, architecture.head_dim
    if rank := architecture.kv_lora_rank:
        rotary = architecture.rope_head_dim
        ratio = 2 * heads * width / (rank + rotary)
        return (
            f"a latent of {rank} and {rotary} rotary elements, the same for all {heads} heads: a cache {ratio:.3g} times "
            f"smaller than keys and values of {width} each"
        )
    shared = architecture.num_heads // heads
    grouped = f", {shared} query heads on each: a cache {shared} times smaller than with one each" if shared > 1 else ""
    return f"{heads} heads of {width}{grouped}"


def _windows_text(sizes: KvCacheSizes) -> str:
    architecture = sizes.cache.architecture
    windows = {layer.sliding_window for layer, _ in sizes.cache.layers if layer.num_windowed_layers}
    shorter = sorted(window for window in windows if window and window < sizes.context)
    if not shorter:
        return ""
    windowed, window = architecture.num_windowed_layers, " or ".join(f"{window:,}" for window in shorter)
    unwindowed = format_bytes(sizes.bytes_per_token * sizes.context)
    return f"; {windowed} of {architecture.num_layers} layers keep the last {window}, {unwindowed} if they kept all"


def _fit_section(sizes: KvCacheSizes, cluster: Cluster, fit: CacheFit) -> Section:
    rows: list[Row] = [("weights", num_bytes(fit.weight_bytes, "cluster.weight_bytes"), f"in {sizes.weights}")]
    rows += [("runtime", num_bytes(fit.runtime_bytes, "cluster.runtime_bytes"), "")] if fit.runtime_bytes else []
    fits = fit.free_bytes >= 0
    if fits:
        room = f"room for {fit.num_seqs:,} sequences of {sizes.context:,} tokens"
        rows.append(("left for caches", num_bytes(fit.free_bytes, "cluster.free_bytes"), room))
    table = Table(rows=tuple(rows), right=(1,), head=False, indent=2, line=ROW_FORMAT)
    over = Status(f"  the weights DO NOT FIT, {format_bytes(-fit.free_bytes)} too much", "bad")
    title = f"on {cluster.name}: {format_bytes(fit.memory_bytes)} on {cluster.num_devices} devices, split evenly"
    return Section([table] if fits else [table, over], title=title)
