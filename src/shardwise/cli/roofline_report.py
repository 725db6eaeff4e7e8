"""What `shardwise roofline` says of kernels and blocks, for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardwise.units import format_bytes, format_quantity, format_seconds


def kernel_text(payload: Mapping[str, Any]) -> str:
    """One kernel for people."""
    lines = [f"{payload['kernel']} {payload['shapes']} in {_stored(payload)} on {payload['chip']}", *_verdict(payload)]
    if payload["links"]:
        lines += ["", "what a byte sent must go with, FLOPs/byte"]
        for name, link in payload["links"].items():
            rate = format_quantity(link["bytes_per_s"], "B/s")
            lines.append(f"  {name:<14}{rate:>10}  {link['critical_intensity']:>10,.1f}")
    return "\n".join(lines)


def _stored(payload: Mapping[str, Any]) -> str:
    weights = [f"{payload['weights']} weights"] if payload["weights"] != payload["dtype"] else []
    return ", ".join([payload["dtype"], *weights, *payload["options"]])


def _verdict(payload: Mapping[str, Any]) -> Iterable[str]:
    origin = {"hbm": "the chip's", "host": "the chip's from its host", "vmem": "the chip's from VMEM"}[payload["from"]]
    share = payload["attainable_flops_per_s"] / payload["peak_flops_per_s"]
    yield (
        f"  {payload['bound']}-bound: intensity {payload['intensity']:,.1f} FLOPs/byte, "
        f"{origin} {payload['critical_intensity']:,.1f}"
    )
    *transfers, compute = payload["stages"]
    yield (
        f"  compute {format_seconds(compute['seconds']):>9}   {format_quantity(compute['amount'], 'FLOP')} at "
        f"{format_quantity(compute['rate'], 'FLOP/s', digits=4)}"
    )
    moved = f"{format_bytes(payload['read_bytes'])} read and {format_bytes(payload['written_bytes'])} written"
    for stage in transfers:
        yield (
            f"  {stage['name']:<8}{format_seconds(stage['seconds']):>9}   {moved} at {format_quantity(stage['rate'], 'B/s')}"
        )
    yield (
        f"  time    {format_seconds(payload['time_s']):>9}   overlapped, {format_seconds(payload['no_overlap_s'])} one after "
        f"the other; at most {format_quantity(payload['attainable_flops_per_s'], 'FLOP/s')}, {share:.1%} of the peak"
    )
    yield _critical(payload)
    if payload["padding"]:
        yield _padded(payload["padding"])


def _critical(payload: Mapping[str, Any]) -> str:
    slowest = min(payload["stages"][:-1], key=lambda stage: float(stage["rate"]))["name"]
    if not payload["critical_letters"]:
        return f"  {slowest}-bound at every size"
    letters, size = " = ".join(payload["critical_letters"]), payload["critical_size"]
    if size is None:
        return f"  {slowest}-bound at every {letters}"
    return f"  compute-bound from {letters} = {size:,.1f}" if size else f"  compute-bound at every {letters}"


def _padded(padding: Mapping[str, Any]) -> str:
    side = padding["matrix_unit"]
    unit = f"  padded to the matrix unit of {side} x {side}: {padding['efficiency']:.1%} of its FLOPs are useful"
    if padding["efficiency"] == 1:
        return unit
    return f"{unit}, compute {format_seconds(padding['math_s'])}, time {format_seconds(padding['time_s'])}"


def kernels_text(payloads: Sequence[Mapping[str, Any]]) -> str:
    """Several kernels side by side."""
    first = payloads[0]
    head = f"on {first['chip']} in {first['dtype']}, from {first['from']}: compute-bound from " + (
        f"{first['critical_intensity']:,.1f} FLOPs/byte"
    )
    rows = [
        (
            " ".join([one["label"], *one["options"]]), one["flops"], one["moved_bytes"], one["intensity"], one["math_s"],
            one["memory_s"], one["bound"],
        )
        for one in payloads
    ]  # fmt: skip
    return "\n".join([head, *_table("kernel", rows)])


def block_text(payload: Mapping[str, Any]) -> str:
    """The block for people: a table for each phase, and what its kernels take one after the other."""
    sizes = payload["sizes"]
    lines = [
        f"block of {payload['model']['name']}, {sizes['B']:,} x {sizes['T']:,} tokens in {payload['dtype']} on "
        f"{payload['chip']}: compute-bound from {payload['critical_intensity']:,.1f} FLOPs/byte"
    ]
    for phase, total in payload["phases"].items():
        rows = [
            (_operation(one), one["flops"], one["moved_bytes"], one["intensity"], one["math_s"], one["memory_s"], one["bound"])
            for one in payload["operations"]
            if one["phase"] == phase
        ]  # fmt: skip
        lines += ["", *_table(phase, rows)]
        peak = total["flops"] / payload["peak_flops_per_s"] / total["time_s"]
        lines.append(
            f"  = {format_seconds(total['time_s'])} kernel after kernel, {total['compute_bound_s'] / total['time_s']:.1%} of it "
            f"bound by compute; {format_quantity(total['flops'], 'FLOP')}, {peak:.1%} of the peak"
        )
    return "\n".join(lines)


def _operation(one: Mapping[str, Any]) -> str:
    """Elementwise operations that run as one kernel are named by the last."""
    fused = f" ({one['num_operations']} fused)" if one["num_operations"] > 1 else ""
    return f"{one['name']}{fused}"


def _table(title: str, rows: Sequence[tuple[str, float, float, float, float, float, str]]) -> list[str]:
    """Name, FLOPs, bytes, intensity, compute, memory traffic and what binds, a line for each."""
    width = max(len(title), *(len(row[0]) for row in rows))
    lines = [f"  {title:<{width}}{'FLOPs':>13}{'bytes':>10}{'FLOPs/byte':>12}{'compute':>13}{'memory':>11}  bound by"]
    for name, flops, moved, intensity, math_s, memory_s, bound in rows:
        lines.append(
            f"  {name:<{width}}{format_quantity(flops, 'FLOP') if flops else '-':>13}{format_bytes(moved):>10}"
            f"{f'{intensity:,.1f}' if flops else '-':>12}{format_seconds(math_s) if flops else '-':>13}"
            f"{format_seconds(memory_s):>11}  {bound}"
        )
    return lines
