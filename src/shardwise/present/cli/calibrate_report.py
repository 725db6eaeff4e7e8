"""What a calibration found, as sections."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.hardware import CONSTANTS
from shardwise.measure.calibrate.user_cluster_fit import UserClusterFit
from shardwise.present.cli.section import Report, Row, Section, Table
from shardwise.values import format_seconds

MOST_SHOWN = 20  # residuals; --json has all
UNIDENTIFIED = "not identified by these measurements"


def calibrate_report(found: UserClusterFit, source: str, out: str | None) -> Report:
    """What was fitted to what, how far each constant moved, what is off before and after, and the spread."""
    return [
        Section(
            [f"set aside: {count} {reason}" for reason, count in found.skipped.most_common()],
            title=f"{found.user_cluster.nominal.name} under {found.stack.name}: {source}",
        ),
        Section([_constants(found)]),
        Section([_errors(found)]),
        Section([_residuals(found), *_left(found)]),
        Section(list(_spread(found)), title="90% of measured step times lie between these factors times the prediction"),
        *([Section([f"wrote {out}"])] if out else []),
    ]  # fmt: skip


def _constants(found: UserClusterFit) -> Table:
    rows: list[Row] = [("constant", "before", "after", "moved", "(in widths of its prior)")]
    for one in found.constants:
        before, after = (f"{value:.3g} ± {deviation:.2g}" for value, deviation in (
            (one.before, one.before_deviation), (one.after, one.after_deviation)
        ))  # fmt: skip
        words = CONSTANTS[one.name].meaning if one.identified else UNIDENTIFIED
        rows.append((f"  {one.name}", before, after, f"{one.moved:+.1f}", words))
    return Table(rows=tuple(rows), right=(1, 2, 3), line="{:<21}{:>20}{:>20}{:>8}  {}")


def _errors(found: UserClusterFit) -> Table:
    rows: list[Row] = [("|predicted / measured - 1|", "mean", "median", "worst", "bias")]
    for what, benches in (("runs", False), ("micro-benchmarks", True)):
        for when, after in (("before", False), ("after", True)):
            one = found.errors(after, benches=benches)
            if one:
                shares = (f"{share:.1%}" for share in (one.mean, one.median, one.worst))
                rows.append((f"  {one.num_rows} {what}, {when}", *shares, f"{one.bias:+.1%}"))
    return Table(rows=tuple(rows), right=range(1, 5), line="{:<38}{:>8}{:>8}{:>8}{:>8}")


def _residuals(found: UserClusterFit) -> Table:
    rows: list[Row] = [("predicted / measured - 1, largest first", "measured", "before", "after")]
    for one in found.residuals[:MOST_SHOWN]:
        errors = (f"{one.error(after):+.1%}" for after in (False, True))
        rows.append((f"  {one.id}", format_seconds(one.measured_s), *errors))
    return Table(rows=tuple(rows), right=range(1, 4), line="{:<56}{:>10}{:>10}{:>10}")


def _left(found: UserClusterFit) -> Iterator[str]:
    left = len(found.residuals) - MOST_SHOWN
    if left > 0:
        yield f"  and {left} smaller; --json has all"


def _spread(found: UserClusterFit) -> Iterator[str]:
    for kind, (low, high) in found.spread.items():
        count = sum(one.kind == kind for one in found.runs)
        yield f"  {kind:<8}{low:.2f} to {high:.2f}  ({count or 'no'} {'run' if count == 1 else 'runs'} of this kind)"
