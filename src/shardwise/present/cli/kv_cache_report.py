"""A key-value cache, as sections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardwise.present.cli.section import Marked, Report, Row, Section, Table
from shardwise.values import format_bytes

LINE = "  {:<18}{:>9}   {}"


def cache_report(payload: Mapping[str, Any]) -> Report:
    """What a token, a sequence and a batch take, and what fits on a cluster where one was named."""
    rows: list[Row] = [
        ("a token", format_bytes(payload["bytes_per_token"]), ""),
        ("a sequence", format_bytes(payload["sequence_bytes"]), f"of {payload['context']:,} tokens{_windows(payload)}"),
    ]
    if payload["batch"] > 1:
        rows.append((f"{payload['batch']:,} sequences", format_bytes(payload["batch_bytes"]), ""))
    title = f"keys and values of {payload['model']['name']} in {payload['dtype']}"
    table = Table(rows=tuple(rows), right=(1,), head=False, indent=2, line=LINE)
    head = Section([f"  {payload['model']['num_layers']} layers of {_kept(payload)}", table], title=title)
    return [head, *([_fit(payload, payload["cluster"])] if payload["cluster"] else [])]


def _kept(payload: Mapping[str, Any]) -> str:
    """What a layer keeps of a token: keys and values of its heads, or the latent that they come from."""
    heads, width = payload["model"]["num_kv_heads"], payload["model"]["head_dim"]
    if rank := payload["model"]["kv_lora_rank"]:
        rotary = payload["model"]["rope_head_dim"]
        smaller = 2 * heads * width / (rank + rotary)
        return (
            f"a latent of {rank} and {rotary} rotary elements, the same for all {heads} heads: a cache {smaller:.3g} times "
            f"smaller than keys and values of {width} each"
        )
    shared = payload["model"]["num_heads"] // heads
    grouped = f", {shared} query heads on each: a cache {shared} times smaller than with one each" if shared > 1 else ""
    return f"{heads} heads of {width}{grouped}"


def _windows(payload: Mapping[str, Any]) -> str:
    windowed, window = payload["num_windowed_layers"], payload["model"]["sliding_window"]
    if not windowed or window >= payload["context"]:
        return ""
    without = format_bytes(payload["without_windows_bytes"])
    return (
        f"; {windowed} of {payload['model']['num_layers']} layers keep the last {window:,}, {without} if they kept all"
    )


def _fit(payload: Mapping[str, Any], fit: Mapping[str, Any]) -> Section:
    rows: list[Row] = [("weights", format_bytes(fit["weight_bytes"]), f"in {fit['weights']}")]
    rows += [("runtime", format_bytes(fit["runtime_bytes"]), "")] if fit["runtime_bytes"] else []
    fits = fit["free_bytes"] >= 0
    if fits:
        left = f"room for {fit['num_seqs']:,} sequences of {payload['context']:,} tokens"
        rows.append(("left for caches", format_bytes(fit["free_bytes"]), left))
    table = Table(rows=tuple(rows), right=(1,), head=False, indent=2, line=LINE)
    over = Marked(f"  the weights DO NOT FIT, {format_bytes(-fit['free_bytes'])} too much", "bad")
    title = f"on {fit['name']}: {format_bytes(fit['memory_bytes'])} on {fit['num_devices']} devices, split evenly"
    return Section([table] if fits else [table, over], title=title)
