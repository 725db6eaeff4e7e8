"""Whether the layout that is predicted to be the fastest was: layouts of one model, measured beside each other on one machine.

The error of single rows does not show how well layouts are ranked, since people publish the layout that they had chosen. A group
is rows that differ in their layout alone: by default the same source, software, model, chip, number of devices, sequence,
batch and precision (`KEY`), and at least `FEWEST` layouts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.calibrate.accuracy import Judged, judge
from shardwise.calibrate.published_runs.rows import Row, layout_rows, published_rows
from shardwise.calibrate.ranking import APART, grouped, key_of, ordered_pairs
from shardwise.progress import Progress, silent

SCHEMA = "shardwise.validate.groups/1"
SAME = ("software", "model", "chip", "n_devices", "seq_len", "global_batch", "dtype")
KEY = ("family", *SAME)
FEWEST = 3  # layouts of a group
# The halves of the study of layouts: constants are fitted to the groups of the first, the second is never fitted.
FITTED, KEPT = "layouts, fitted half", "layouts, left out"
PUBLISHED = "published runs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layouts:
    """One group: measured and predicted seconds of each row, by the row's name."""

    key: tuple[str, ...]
    measured_s: dict[str, float]
    predicted_s: dict[str, float]

    @property
    def pick(self) -> str:
        """The row that is predicted to be the fastest."""
        return min(self.predicted_s, key=lambda row: self.predicted_s[row])

    @property
    def best(self) -> str:
        """The row that was."""
        return min(self.measured_s, key=lambda row: self.measured_s[row])

    @property
    def regret(self) -> float:
        """By how much the pick takes longer than the best."""
        return self.measured_s[self.pick] / self.measured_s[self.best] - 1.0

    @property
    def pairs(self) -> tuple[int, int]:
        """Pairs whose times differ by over a tenth: how many there are, and how many are ordered correctly."""
        return ordered_pairs([(seconds, self.predicted_s[row]) for row, seconds in self.measured_s.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How well the layouts of all groups are ranked: shares and ratios."""

    num_groups: int
    num_pairs: int
    ordered: float
    picked: int
    mean_regret: float
    worst_regret: float


def choice(groups: Sequence[Layouts]) -> Choice | None:
    """That of some groups; None without any pair."""
    pairs = [group.pairs for group in groups]
    apart = sum(count for count, _ in pairs)
    if not apart:
        return None
    regrets = [group.regret for group in groups]
    return Choice(
        num_groups=len(groups), num_pairs=apart, ordered=sum(right for _, right in pairs) / apart,
        picked=sum(group.regret == 0.0 for group in groups), mean_regret=sum(regrets) / len(regrets),
        worst_regret=max(regrets),
    )  # fmt: skip


def groups_of(judged: Sequence[Judged]) -> list[Layouts]:
    """The groups of rows that count; of several rows of one configuration the first."""
    counted = (one for one in judged if one.scored and one.error is not None)
    found = grouped(counted, lambda one: one.row, SAME)
    return [_group(key, rows) for key, rows in sorted(found.items()) if len(rows) >= FEWEST]


def _group(key: tuple[str, ...], rows: Sequence[Judged]) -> Layouts:
    measured = {one.row.id: one.row.step_time_s or 0.0 for one in rows}
    predicted = {one.row.id: one.prediction.estimate.step_time_s for one in rows if one.prediction}
    return Layouts(key=key, measured_s=measured, predicted_s=predicted)


def half(rows: Sequence[Row], *, fitted: bool) -> list[Row]:
    """The rows of every other group of the study of layouts, in the order of their keys."""
    keys = sorted({key_of(row, SAME) for row in rows})
    own = set(keys[0 if fitted else 1 :: 2])
    return [row for row in rows if key_of(row, SAME) in own]


def num_groups(rows: Sequence[Row]) -> int:
    """Groups that some rows are of."""
    return len({key_of(row, SAME) for row in rows})


def published_groups(progress: Progress = silent) -> dict[str, list[Layouts]]:
    """The groups of the published runs, and of either half of the study of layouts."""
    study = layout_rows()
    sets = {PUBLISHED: published_rows(), FITTED: half(study, fitted=True), KEPT: half(study, fitted=False)}
    return {name: groups_of(judge(rows, progress=progress)) for name, rows in sets.items()}


class GroupPayload(TypedDict):
    """Layouts of one model on one machine: seconds by row, the fastest row, the one that is predicted to be, and the regret."""

    of: str
    key: dict[str, str]
    layouts: int
    best: str
    pick: str
    regret: float
    measured_s: dict[str, float]
    predicted_s: dict[str, float]


class GroupsPayload(TypedDict):
    """How well layouts are ranked, over all groups and for each."""

    schema: Literal["shardwise.validate.groups/1"]
    key: list[str]
    fold: str
    fewest_layouts: int
    apart: float
    summary: dict[str, Choice]
    groups: list[GroupPayload]


def groups_payload(found: dict[str, list[Layouts]]) -> dict[str, Any]:
    """What `shardwise validate --groups --json` prints."""
    return {
        "schema": SCHEMA, "key": list(KEY), "fold": "fitted", "fewest_layouts": FEWEST, "apart": APART,
        "summary": {name: asdict(one) for name, groups in found.items() if (one := choice(groups))},
        "groups": [
            {
                "of": name, "key": dict(zip(KEY, group.key, strict=True)), "layouts": len(group.measured_s),
                "best": group.best, "pick": group.pick, "regret": group.regret,
                "measured_s": group.measured_s, "predicted_s": group.predicted_s,
            }
            for name, groups in found.items() for group in groups
        ],
    }  # fmt: skip


def groups_report(found: dict[str, list[Layouts]]) -> str:
    """A table of all sets, and the groups in which the pick loses most."""
    lines = [
        f"layouts compared: rows alike in {', '.join(KEY)}; at least {FEWEST} layouts; the constants of the package",
        "",
        f"{'':<24}{'groups':>8}{'pairs':>8}{'ordered':>9}{'best picked':>13}{'mean regret':>13}{'worst':>8}",
    ]
    for name, groups in found.items():
        one = choice(groups)
        if one:
            lines.append(
                f"{name:<24}{one.num_groups:>8}{one.num_pairs:>8}{one.ordered:>9.1%}{one.picked:>13}{one.mean_regret:>13.1%}"
                f"{one.worst_regret:>8.1%}"
            )
    lines += ["", "pairs: those that differ by over a tenth; regret: how much longer the pick takes than the best", ""]
    return "\n".join([*lines, "largest regrets", *_worst(found)])


def _worst(found: dict[str, list[Layouts]], count: int = 10) -> Iterator[str]:
    every = [(group, name) for name, groups in found.items() for group in groups if group.regret > 0]
    for group, name in sorted(every, key=lambda one: -one[0].regret)[:count]:
        of, _, model, chip, devices, seq_len, batch, _ = group.key
        yield f"  {group.regret:>6.1%}  {model} on {devices} {chip}, {batch} sequences of {seq_len} ({of}; {name})"
        yield f"          picked {group.pick}, best {group.best}"
