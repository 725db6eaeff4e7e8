"""Figures that a run of `gpu_check.py` must show, and whether it did: reached, not reached, or not run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

State = Literal["reached", "not reached", "not run"]
Results = Mapping[str, Mapping[str, Any]]  # of the parts that ran, by name
OURS, AUTOCAST = "shardwise", "plain, fp32 weights under autocast"
OLMOE_BEFORE = 28_339  # tokens/s of the engine with PyTorch's kernels, one H200, 2026-11-27 (benchmarks/gpu/README.md)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line: what is required, the figure that was seen (None where it was not run), and the state."""

    line: str
    parts: tuple[str, ...]
    required: str
    figure: float | None
    state: State


@dataclass(frozen=True, slots=True)
class Requirement:
    """A figure of some parts and its limit, at least or at most."""

    line: str
    parts: tuple[str, ...]
    figure: Callable[[Results], float | None]
    limit: float
    at_most: bool = False
    unit: str = ""

    def judge(self, results: Results) -> Verdict:
        """Return the verdict on the results of the parts that ran."""
        figure = self.figure(results) if all(part in results for part in self.parts) else None
        required = f"{'at most' if self.at_most else 'at least'} {self.limit:g}{self.unit}"
        state: State = "not run"
        if figure is not None:
            is_reached = figure <= self.limit if self.at_most else figure >= self.limit
            state = "reached" if is_reached else "not reached"
        return Verdict(self.line, self.parts, required, figure, state)


def _side(part: str, key: str, side: str = OURS) -> Callable[[Results], float | None]:
    def figure(results: Results) -> float | None:
        value = results[part]["sides"][side][key]
        return None if value is None else float(value)

    return figure


def _ratio(numerator: Callable[[Results], float | None], denominator: Callable[[Results], float | None]) -> Any:
    def figure(results: Results) -> float | None:
        above, below = numerator(results), denominator(results)
        return None if above is None or below is None else above / below

    return figure


def _reserved_gb(results: Results) -> float | None:
    reserved = _side("train-1b", "reserved_bytes")(results)
    return None if reserved is None else reserved / 1e9


def _olmoe_gain(results: Results) -> float | None:
    """Tokens/s of the mixture of experts over those before; None on a chip other than that of the figure before."""
    tokens_per_s = _side("train-moe", "tokens_per_s")(results)
    is_alike = results["train-moe"]["chip"] == "h200"
    return tokens_per_s / OLMOE_BEFORE if is_alike and tokens_per_s is not None else None


def _step_error(results: Results) -> float | None:
    """Return by how much the step of the 1B model differs from its prediction for the machine as it was measured."""
    predicted = results["machine"]["predicted_1b_s"]
    measured = _side("train-1b", "seconds")(results)
    return None if predicted is None or measured is None else abs(predicted / measured - 1.0)


REQUIREMENTS = (
    Requirement(
        "1B in bf16 over plain PyTorch with fp32 weights under autocast, tokens/s", ("train-1b",),
        _ratio(_side("train-1b", "tokens_per_s"), _side("train-1b", "tokens_per_s", AUTOCAST)), 1.08,
    ),
    Requirement("1B in bf16, reserved memory", ("train-1b",), _reserved_gb, 44.0, at_most=True, unit=" GB"),
    Requirement("1B in bf16, MFU (causal)", ("train-1b",), _side("train-1b", "mfu"), 0.57),
    Requirement("3B in bf16, MFU (causal)", ("train-3b",), _side("train-3b", "mfu"), 0.58),
    Requirement(
        "3B in FP8 over bf16, tokens/s", ("train-3b", "train-3b-fp8"),
        _ratio(_side("train-3b-fp8", "tokens_per_s"), _side("train-3b", "tokens_per_s")), 1.15,
    ),
    Requirement(
        "the loss over reading and writing the logits once, seconds", ("loss",), lambda results: results["loss"]["ratio"], 3.0,
        at_most=True,
    ),
    # By bytes 26 of 40: 10 and 12 of a norm, 6 and 10 of a gated activation, 10 and 18 of its gradients, for each element.
    Requirement(
        "casts in norms and gated activations over casts behind them, seconds", ("casts",),
        lambda results: results["casts"]["ratio"], 0.8, at_most=True,
    ),
    Requirement("OLMoE over the engine before, tokens/s on an H200", ("train-moe",), _olmoe_gain, 1.3),
    Requirement(
        "the step of 1B after bench machine, difference from its prediction", ("machine", "train-1b"), _step_error, 0.05,
        at_most=True,
    ),
    Requirement(
        "kernels, collectives and replays are the planned ones", ("captured",),
        lambda results: float(results["captured"]["equal"]), 1.0,
    ),
)  # fmt: skip


def judge(parts: Mapping[str, Mapping[str, Any]], *, has_gpu: bool) -> list[Verdict]:
    """Return the verdicts on the parts of a record; without a GPU no figure counts."""
    results = {name: outcome["result"] for name, outcome in parts.items() if outcome["state"] == "ok" and has_gpu}
    return [requirement.judge(results) for requirement in REQUIREMENTS]


def to_records(verdicts: list[Verdict]) -> list[dict[str, Any]]:
    """Return verdicts as JSON."""
    return [asdict(verdict) for verdict in verdicts]


def describe(verdicts: list[Verdict]) -> Iterator[str]:
    """Yield a line for each verdict."""
    for verdict in verdicts:
        figure = "" if verdict.figure is None else f"{verdict.figure:.3g}, "
        yield f"{verdict.state:<12} {verdict.line}: {figure}{verdict.required} required ({', '.join(verdict.parts)})"
