"""A layout in the words that people use of one: TP 8, PP 4, DP 16 with a distributed optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.layout import Layout

# By ZeRO stage. Names of Megatron-LM and of PyTorch's FSDP2, whose weights stay gathered or not after a forward pass.
SHARDED = {
    0: "gradients all-reduced",
    1: "distributed optimizer (ZeRO-1)",
    2: "FSDP, weights gathered once per step (ZeRO-2)",
    3: "FSDP, weights gathered for each pass (ZeRO-3)",
}


def layout_words(layout: Layout) -> str:
    """The degrees that are above 1, the data parallelism with what of it is sharded, and what is recomputed.

    >>> layout_words(Layout.parse("tp=8 pp=4 fsdp=16 zero_stage=1 num_virtual_stages=5"))
    'TP 8 with sequence parallelism, PP 4 (interleaved, VPP 5), DP 16, distributed optimizer (ZeRO-1), no recomputation'
    """
    return ", ".join(_words(layout))


def _words(layout: Layout) -> Iterator[str]:
    if layout.tp > 1:
        beside = " with sequence parallelism" * layout.sequence_parallel + ", overlapped" * layout.async_tp
        yield f"TP {layout.tp}{beside}"
    if layout.cp > 1:
        yield f"CP {layout.cp}"
    if layout.pp > 1:
        virtual = f", VPP {layout.num_virtual_stages}" if layout.num_virtual_stages > 1 else ""
        yield f"PP {layout.pp} ({layout.schedule}{virtual})"
    if layout.ep > 1:
        yield f"EP {layout.ep}" + (f" with ETP {layout.expert_tp}" if layout.expert_tp > 1 else "")
    copies = f" ({layout.dp} replicas of {layout.fsdp} shards)" if layout.dp > 1 and layout.fsdp > 1 else ""
    yield f"DP {layout.num_replicas}{copies}"
    if layout.num_replicas > 1 or layout.zero_stage:
        yield SHARDED[layout.zero_stage]
    some = f" of {layout.recompute_layers} layers of each stage" if layout.recompute_layers is not None else ""
    yield "no recomputation" if layout.recompute == "none" else f"recompute {layout.recompute}{some}"
