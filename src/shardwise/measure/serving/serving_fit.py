"""Fit of serving constants to published rows, and predictions of rows that were left out.

Constants are searched on a logarithmic scale around their priors, in units of the priors' widths; residuals are of the
logarithm of a latency, and pull only linearly beyond `HUBER` deviations. A release differs from its engine by a factor on its
passes, and again on each chip and format: these factors are not searched but follow from the residuals, drawn towards 1 by how
few rows they rest on (`release_offsets`), and count in the loss, so that constants explain what they can.

TPOT is fitted first; the constants of first tokens follow with all others held. Folds leave out all rows of a model family, a
chip, an engine or a source: the constants are fitted to the other rows, and the rows left out are predicted with the factors of
those releases that other rows have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwise.measure.serving.batch_rows import SOURCE as BATCH_SOURCE
from shardwise.measure.serving.batch_rows import published_batch_rows
from shardwise.measure.serving.row_stack import RowStack, stack_rows
from shardwise.measure.serving.serving_rows import ServingRow, published_serving_rows
from shardwise.serve.serving_constants import CONSTANT_NAMES, EARLIER_RELEASES, ENGINE_CONSTANTS, ServingConstants

Array = NDArray[np.float64]
Key = tuple[str, str | None]  # a constant, and the engine that it is of

SIGMA_TPOT, SIGMA_TTFT = 0.24, 0.3  # deviations of single rows
HUBER = 1.0
OFFSET_WEIGHT_TPOT, OFFSET_WEIGHT_TTFT = 0.3, 1.0  # of a release's factor in the loss
OFFSET_ROWS = 10.0  # rows of one release are alike: more than these say nothing new of its factor
OFFSET_SPREADS_TPOT, OFFSET_SPREADS_TTFT = (0.10, 0.08), (0.05, 0.05)  # of releases, of a chip and format of one
ROW_SPREAD_TPOT, ROW_SPREAD_TTFT = 0.12, 0.4
LARGEST_RESIDUAL_TPOT, LARGEST_RESIDUAL_TTFT = 0.6, 1.5  # that factors are taken from
FULL_SHARE = 0.9  # of memory: first tokens of rows beyond wait for it, and say nothing of a release
STEP = 1e-3
FOLDS = ("family", "chip", "engine", "source")
FIRST_TOKEN_CONSTANTS = (
    "request_s", "wait_passes", "prompt_factor", "request_host_s", "server_turn_s",
    "input_token_host_s",
)  # fmt: skip
# Fitted again to both latencies: how fast inputs are computed shows best in first tokens.
INPUT_CONSTANTS = ("eager_launch_s", "prompt_share", "expert_prompt_share", "prompt_attention_share")
PRIORS: Mapping[str, tuple[float, float]] = {  # value, and deviation of its logarithm
    "weight_share": (0.80, 0.10), "expert_share": (0.70, 0.40), "cache_share": (0.85, 0.20), "decode_share": (0.50, 0.30),
    "decode_attention_share": (0.50, 0.40), "prompt_share": (0.60, 0.30), "expert_prompt_share": (0.35, 0.12),
    "prompt_attention_share": (0.50, 0.08), "fp4_factor": (1.2, 0.30), "fp4_expert_factor": (1.2, 0.30),
    "int4_expert_factor": (1.2, 0.30), "fp8_expert_factor": (1.0, 0.30), "routing_skew": (0.80, 0.30),
    "expert_imbalance": (1.1, 0.20), "indexer_kernels": (8.0, 0.30), "expert_kernels": (1.0, 0.30),
    "fp4_expert_kernels": (1.0, 0.30), "recurrence_kernels": (1.0, 0.30), "cast_kernels": (0.5, 0.70),
    # Nodes with A100 have EPYC 7V12 (Rome), with H100 Xeon 8480C. Source: Azure documentation, ND A100 v4 and ND H100 v5.
    "hopper_launch_factor": (1.0, 0.10), "ampere_host_factor": (1.4, 0.20), "reduce_hop_s": (3e-6, 0.50),
    "exchange_s": (1e-5, 0.70), "link_share": (0.50, 0.50),
    "kernel_s": (3e-6, 0.70), "pass_host_s": (5e-4, 0.70), "sequence_host_s": (1e-5, 0.70), "eager_launch_s": (4e-5, 0.10),
    "request_s": (0.05, 0.12), "wait_passes": (1.5, 0.08), "prompt_factor": (1.1, 0.06),
    "request_host_s": (5e-4, 0.15), "server_turn_s": (1.5e-2, 0.10),
    "input_token_host_s": (2e-6, 0.30), "memory_fraction": (0.92, 0.04),
    "capacity_margin": (1.1, 0.15), "acceptance": (0.70, 0.20),
}  # fmt: skip
# vLLM compiles passes with inputs and captures what is between attentions, so that it launches few pieces. Source: vLLM
# documentation, torch.compile integration, piecewise CUDA graphs. vLLM of 2023 prepared and sampled each sequence in Python: of
# Llama 3 8B's time on H100 62% was the host's even in 2024 (vLLM blog, "vLLM v0.6.0: 2.7x Throughput Improvement", 2024-09-05).
# Splitwise took the times of prompts in the engine, without a server. These two priors, and that of hosts of A100, were stated
# after a look at its rows.
ENGINE_PRIORS: Mapping[Key, tuple[float, float]] = {
    ("eager_launch_s", "vllm"): (6e-6, 0.10),
    ("sequence_host_s", "vllm 0.2"): (2e-4, 0.70), ("request_s", "vllm 0.2"): (0.01, 0.70),
}  # fmt: skip


def prior(key: Key) -> tuple[float, float]:
    """Return the prior of a constant, and the deviation of its logarithm."""
    return ENGINE_PRIORS.get(key, PRIORS[key[0]])


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedConstants:
    """Constants by name and engine, and the factors of releases that were fitted beside them."""

    values: Mapping[Key, float]

    def of_engine(self, engine: str) -> ServingConstants:
        """Return the constants of an engine."""
        names = (*ENGINE_CONSTANTS, *EARLIER_RELEASES.get(engine, ()))
        return ServingConstants(
            **{name: self.values[name, engine if name in names else None] for name in CONSTANT_NAMES}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPredictions:
    """Logarithms of predictions over measurements of all rows: of TPOT and TTFT, without factors of releases, and the share of
    memory
    that each row's requests take."""

    tpot: Array
    ttft: Array
    fill: Array


@dataclass(frozen=True)
class RowTable:
    """Rows with what a fit reads of them."""

    rows: Sequence[ServingRow]
    stacks: tuple[RowStack, ...]
    tpot_s: Array
    ttft_s: Array
    weights: Array
    releases: NDArray[np.int64]
    configurations: NDArray[np.int64]

    @classmethod
    def of(cls, rows: Sequence[ServingRow]) -> RowTable:
        """Return the table of rows."""
        return cls(
            rows=rows, stacks=stack_rows(rows), tpot_s=np.array([row.tpot_s for row in rows]),
            ttft_s=np.array([row.ttft_s for row in rows]), weights=np.array([row_weight(row) for row in rows]),
            releases=_number([(row.engine, row.release_name) for row in rows]),
            configurations=_number(
                [(row.engine, row.release_name, row.chip, row.expert_or_weight_format) for row in rows]
            ),
        )  # fmt: skip

    def predict(self, constants: FittedConstants) -> RowPredictions:
        """Return the residuals of all rows under constants."""
        tpot, ttft, fill = (np.zeros(len(self.rows)) for _ in range(3))
        for stack in self.stacks:
            engine_constants = constants.of_engine(stack.engine.constants_name)
            state = stack.solve(engine_constants)
            tpot[stack.index], ttft[stack.index] = state.tpot_s, state.ttft_s
            fill[stack.index] = stack.present / np.maximum(state.running, 1e-9)
        return RowPredictions(tpot=np.log(tpot / self.tpot_s), ttft=np.log(ttft / self.ttft_s), fill=fill)


def fitted_rows() -> tuple[ServingRow, ...]:
    """Return the rows that constants are fitted to: published loads, and single batches that were computed at once."""
    return (*published_serving_rows(), *(row.serving_row for row in published_batch_rows() if row.is_whole))


def row_weight(row: ServingRow) -> float:
    """Return the weight of a row in the fit: less of one lab's rows whose concurrency was not reached, and of single batches on
    eight pairs of a model and a node; none of a row that no chip's compute allows (13.7 ms a token beside inputs that alone take
    100 ms)."""
    if row.source == BATCH_SOURCE:
        return 0.3
    if row.engine == "trtllm" and row.release == "1.3.0rc5":
        return 0.0
    return 0.3 if row.model == "llama-3.1-8b" and row.engine == "vllm" else 1.0


def _number(keys: Sequence[Any]) -> NDArray[np.int64]:
    order = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([order[key] for key in keys], dtype=np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class OffsetRule:
    """Fit of the factors of releases to residuals of one latency."""

    spreads: tuple[float, float]
    row_spread: float
    largest: float


TPOT_OFFSETS = OffsetRule(spreads=OFFSET_SPREADS_TPOT, row_spread=ROW_SPREAD_TPOT, largest=LARGEST_RESIDUAL_TPOT)
TTFT_OFFSETS = OffsetRule(spreads=OFFSET_SPREADS_TTFT, row_spread=ROW_SPREAD_TTFT, largest=LARGEST_RESIDUAL_TTFT)


def release_offsets(residuals: Array, table: RowTable, weights: Array, rule: OffsetRule) -> Array:
    """Return the logarithm of each row's factor: of its release, and of the release on its chip and format. Rows of weight 0
    get the
    factors of those that others have."""
    offsets = np.zeros(len(residuals))
    for groups, spread in zip((table.releases, table.configurations), rule.spreads, strict=True):
        clipped = np.clip(residuals + offsets, -rule.largest, rule.largest)
        total = np.bincount(groups, weights)
        effective = np.minimum(total, OFFSET_ROWS)
        pull = effective / (effective + (rule.row_spread / spread) ** 2)
        mean = np.bincount(groups, weights * clipped) / np.maximum(total, 1e-9)
        offsets = offsets - (pull * mean)[groups]
    return offsets


def fit_constants(
    table: RowTable, included: NDArray[np.bool_], start: FittedConstants | None = None
) -> FittedConstants:
    """Return the constants that the included rows lead to."""
    weights = table.weights * included
    current = start or FittedConstants(values={key: prior(key)[0] for key in constant_keys()})

    def tpot_residuals(constants: FittedConstants) -> Array:
        residuals = table.predict(constants).tpot
        offsets = release_offsets(residuals, table, weights, TPOT_OFFSETS)
        parts = ((residuals + offsets)[included], OFFSET_WEIGHT_TPOT * offsets[included])
        return np.concatenate([part * weights[included] / SIGMA_TPOT for part in parts])

    def ttft_residuals(constants: FittedConstants) -> Array:
        predictions = table.predict(constants)
        roomy_weights = weights * (predictions.fill < 1.0 / FULL_SHARE)
        offsets = release_offsets(predictions.ttft, table, roomy_weights, TTFT_OFFSETS)
        parts = ((predictions.ttft + offsets)[included], OFFSET_WEIGHT_TTFT * offsets[included])
        return np.concatenate([part * roomy_weights[included] / SIGMA_TTFT for part in parts])

    keys = constant_keys()
    first = [key for key in keys if key[0] not in FIRST_TOKEN_CONSTANTS]
    second = [key for key in keys if key[0] in (*FIRST_TOKEN_CONSTANTS, *INPUT_CONSTANTS)]
    steps = 12 if start is None else 4

    def residuals_of_both(constants: FittedConstants) -> Array:
        return np.concatenate([tpot_residuals(constants), ttft_residuals(constants)])

    return _minimise(_minimise(current, first, tpot_residuals, steps), second, residuals_of_both, steps)


def constant_keys() -> tuple[Key, ...]:
    """Return the constants that are searched: those of all engines, and those of each."""
    engines = ("vllm", "sglang", "trtllm", *EARLIER_RELEASES)
    shared: list[Key] = [(name, None) for name in CONSTANT_NAMES if name not in ENGINE_CONSTANTS]
    earlier: list[Key] = [(name, release) for release, names in EARLIER_RELEASES.items() for name in names]
    return (*shared, *((name, engine) for name in ENGINE_CONSTANTS for engine in engines), *earlier)


def _minimise(start: FittedConstants, keys: Sequence[Key], residuals: Any, max_steps: int) -> FittedConstants:
    """Return the constants at the least Huber loss of residuals and priors: damped Gauss-Newton with finite differences."""
    center = np.array([np.log(prior(key)[0]) for key in keys])
    width = np.array([prior(key)[1] for key in keys])
    point = np.array([np.log(start.values[key]) for key in keys])

    def constants_at(logs: Array) -> FittedConstants:
        return FittedConstants(values={**start.values, **dict(zip(keys, np.exp(logs).tolist(), strict=True))})

    def loss_of(values: Array, logs: Array) -> float:
        size = np.abs(values)
        robust = np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))
        return float(robust.sum() + 0.5 * (((logs - center) / width) ** 2).sum())

    values, damping = residuals(constants_at(point)), 1e-2
    loss = loss_of(values, point)
    for _ in range(max_steps):
        slopes = np.stack(
            [(residuals(constants_at(point + STEP * unit)) - values) / STEP for unit in np.eye(len(keys))], axis=1
        )
        robust = np.minimum(1.0, HUBER / np.maximum(np.abs(values), 1e-12))
        hessian = slopes.T @ (slopes * robust[:, None]) + np.diag(width**-2.0)
        gradient = slopes.T @ (robust * values) + (point - center) / width**2
        for _ in range(6):
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
            candidate = point - np.clip(step, -1.0, 1.0)
            candidate_values = residuals(constants_at(candidate))
            candidate_loss = loss_of(candidate_values, candidate)
            if candidate_loss < loss:
                break
            damping *= 8.0
        else:
            break
        gain, point, values, loss = loss - candidate_loss, candidate, candidate_values, candidate_loss
        damping = max(damping / 8.0, 1e-4)
        if gain < 1e-3 * loss:
            break
    return constants_at(point)


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldPredictions:
    """Residuals of all rows, each predicted without the rows that are like it in `fold`. Factors of releases are in
    the residuals. `constants` by group that was left out."""

    fold: str
    groups: tuple[str, ...]
    tpot: Array
    ttft: Array
    constants: Mapping[str, FittedConstants]


def with_offsets(table: RowTable, constants: FittedConstants, included: NDArray[np.bool_]) -> tuple[Array, Array]:
    """Return the residuals of TPOT and TTFT of all rows with the factors of the releases that included rows have."""
    predictions = table.predict(constants)
    weights = table.weights * included
    roomy = predictions.fill < 1.0 / FULL_SHARE
    tpot = predictions.tpot + release_offsets(predictions.tpot, table, weights, TPOT_OFFSETS)
    ttft = predictions.ttft + roomy * release_offsets(predictions.ttft, table, weights * roomy, TTFT_OFFSETS)
    return tpot, ttft


def fold_groups(rows: Sequence[ServingRow], fold: str) -> tuple[str, ...]:
    """Return the group of each row that a fold leaves out together."""
    keys = {"family": "model", "chip": "chip", "engine": "engine", "source": "source"}
    return tuple(str(getattr(row, keys[fold])) for row in rows)


def predict_left_out(table: RowTable, fitted: FittedConstants, fold: str) -> FoldPredictions:
    """Return the predictions of each group of rows by constants that are fitted to the others."""
    groups = fold_groups(table.rows, fold)
    tpot, ttft = np.zeros(len(groups)), np.zeros(len(groups))
    constants = {}
    for group in dict.fromkeys(groups):
        included = np.array([name != group for name in groups])
        constants[group] = fit_constants(table, included, fitted)
        fold_tpot, fold_ttft = with_offsets(table, constants[group], included)
        tpot[~included], ttft[~included] = fold_tpot[~included], fold_ttft[~included]
    return FoldPredictions(fold=fold, groups=groups, tpot=tpot, ttft=ttft, constants=constants)
