"""What a calibration found, as text."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.calibrate.own import OwnFit, Residual
from shardwise.cluster.calibration import CONSTANTS
from shardwise.units import format_seconds

MOST_SHOWN = 20  # residuals; --json has all
UNIDENTIFIED = "not identified by these measurements"


def calibrate_text(found: OwnFit, source: str, out: str | None) -> str:
    """The report for people."""
    head = [f"{found.own.nominal.name} under {found.stack.name}: {source}"]
    head += [f"set aside: {count} {reason}" for reason, count in found.aside.most_common()]
    parts = [head, list(_constants(found)), list(_errors_table(found)), list(_residuals(found)), list(_spread(found))]
    parts += [[f"wrote {out}"]] if out else []
    return "\n\n".join("\n".join(lines) for lines in parts)


def _constants(found: OwnFit) -> Iterator[str]:
    yield f"{'constant':<21}{'before':>20}{'after':>20}{'moved':>8}  (in widths of its prior)"
    for one in found.constants:
        before, after = (f"{value:.3g} ± {deviation:.2g}" for value, deviation in (
            (one.before, one.before_deviation), (one.after, one.after_deviation)
        ))  # fmt: skip
        words = CONSTANTS[one.name].meaning if one.identified else UNIDENTIFIED
        yield f"  {one.name:<19}{before:>20}{after:>20}{one.moved:>+8.1f}  {words}"


def _errors_table(found: OwnFit) -> Iterator[str]:
    yield f"{'|predicted / measured - 1|':<38}" + "".join(f"{name:>8}" for name in ("mean", "median", "worst", "bias"))
    for what, benches in (("runs", False), ("micro-benchmarks", True)):
        for when, after in (("before", False), ("after", True)):
            one = found.errors(after, benches=benches)
            if one:
                shares = "".join(f"{share:>8.1%}" for share in (one.mean, one.median, one.worst))
                yield f"  {f'{one.num_rows} {what}, {when}':<36}{shares}{one.bias:>+8.1%}"


def _residuals(found: OwnFit) -> Iterator[str]:
    yield f"{'predicted / measured - 1, largest first':<56}{'measured':>10}{'before':>10}{'after':>10}"
    for one in found.residuals[:MOST_SHOWN]:
        yield _residual(one)
    left = len(found.residuals) - MOST_SHOWN
    if left > 0:
        yield f"  and {left} smaller; --json has all"


def _residual(one: Residual) -> str:
    errors = "".join(f"{one.error(after):>+10.1%}" for after in (False, True))
    return f"  {one.id:<54}{format_seconds(one.measured_s):>10}{errors}"


def _spread(found: OwnFit) -> Iterator[str]:
    yield "90% of measured step times lie between these factors times the prediction"
    for kind, (low, high) in found.spread.items():
        count = sum(one.kind == kind for one in found.runs)
        yield f"  {kind:<8}{low:.2f} to {high:.2f}  ({count or 'no'} {'run' if count == 1 else 'runs'} of this kind)"
