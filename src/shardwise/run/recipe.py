"""The recipe of a run: what changes its values and neither its layout nor its price. It is kept with the run.

A `TrainingRecipe` has the learning rate and its schedule, the precision of scaled products, the balancing of experts,
the actions for anomalous steps, and the folders of token shards with the weights by which their sequences are drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, assert_never

from shardwise.model import get_optimizer
from shardwise.model.optimizers.definition import optimizer_fields
from shardwise.values import BUCKET_BYTES, InputError, parse_quantity, raise_problems
from shardwise.values.engine_policies import GRADIENT_REDUCTIONS, GradientReduction
from shardwise.values.precision import AmaxAlgorithm, DelayedScaling

LearningRateSchedule = Literal["cosine", "wsd", "constant"]
BalanceMethod = Literal["auxiliary", "bias", "none"]
BatchLrRule = Literal["none", "sqrt", "linear"]
LR_SCHEDULES: tuple[LearningRateSchedule, ...] = ("cosine", "wsd", "constant")
BALANCE_METHODS: tuple[BalanceMethod, ...] = ("auxiliary", "bias", "none")
# Exponent of the batch over the plan's batch, which multiplies the learning rate. Sources: Goyal et al. 2017 (linear, SGD);
# Malladi et al. 2022 (square root, Adam).
BATCH_LR_RULES: Mapping[BatchLrRule, float] = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}
# Steps of the mean, standard deviations above it that are a spike, and steps that are needed at least. Source: OLMo-core,
# optim/skip_step_optimizer.py (rolling_interval_length, sigma_factor; read 2026-11), which skips such steps once it has half
# of the window and at least 20 steps. Differs: there a loss as far below the mean counts too.
SPIKE_WINDOW, SPIKE_DEVIATIONS, MIN_SPIKE_STEPS = 128, 6.0, 20


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """The recipe of a run of `steps` optimizer steps.

    `data`: folders of token shards, each with the weight by which its sequences are drawn. `initial`: a folder of
    Hugging Face, torchtitan or Megatron-LM with the initial weights, and with the constants of the arithmetic where it
    has them; None: initial values from the seed.

    The learning rate rises over `warmup_steps` to `learning_rate`; `cosine` then falls to `final_fraction` of it at the
    last step, `wsd` stays and falls linearly over the last `decay_steps`. `optimizer`: hyperparameters of the plan's
    optimizer (`shardwise.model.optimizers`, with their defaults); `clip_norm`: the largest norm of all gradients
    together, None: any.

    In fp16 the loss is multiplied by `loss_scale` before the backward pass, and gradients are divided by it afterwards.
    A step whose gradients are not finite is skipped and multiplies the scale by `loss_scale_backoff`;
    `loss_scale_interval` other steps in a row multiply it by `loss_scale_growth`.

    Scales of products that follow from earlier steps bring the largest value of the last `amax_history` steps (with the
    `amax_algorithm` `most_recent`, of the last step) to the format's largest number over 2^`amax_margin`.

    `reduction`: when replicated gradients are reduced: `after` the backward pass, `per_parameter` as each is ready, or
    `bucketed`, as soon as `bucket_bytes` of them are. `reduce_each_micro_batch`: in every micro-batch, not only in a
    step's last one. `batch_schedule`: how the global batch changes (`shardwise.batch_size.batch_schedule`), or
    `batch_ramp`: pairs of a step and the sequences of the batch from it on; neither: the plan's batch. `batch_lr`: how
    the learning rate, that of the plan's batch, follows; `none` is the default, since published ramps (Brown et al.
    2020, GPT-3; DeepSeek-AI 2025, DeepSeek-V3; Megatron-LM's) do not change it. The run ends once its smoothed loss is
    at most `to_loss` (`shardwise.records.step_log`).

    `balance` keeps experts evenly loaded: an `auxiliary` loss with `balance_coefficient`, or a `bias` of the choice
    that moves by `balance_rate`. With a `capacity_factor` c an expert takes at most ceil(c · rows / experts) of a
    rank's rows in a micro-batch, and drops the rest (Lepikhin et al. 2020, GShard, 2.2; Fedus et al. 2021, Switch
    Transformer, equation 3); None: all rows. `prediction_weight` multiplies the loss of multi-token prediction, the
    mean over its modules. `respect_documents`: attention and targets stay within their document.

    `validate_every`, `checkpoint_every`: steps between validation losses and between checkpoints (0: at the end only);
    `noise_scale_every`: steps between measurements of the gradient noise scale (0: none). The newest `keep_checkpoints`
    are kept, and those whose step is a multiple of `keep_every` (0: no others). A rank without a heartbeat for
    `silent_after_s` is reported, and so is one that works `slow_factor` times as long as others with the same work; no
    wait for another rank is longer than `timeout_s`. An elastic run restarts at most `max_restarts` times.

    `non_finite`, `loss_spike` and `norm_spike`: the action after an anomalous step. `stop` ends the run, `skip` leaves
    its batch out, `rewind` goes back to the newest checkpoint and leaves out the batches since, at most `max_rewinds`
    times in a run (PaLM did so about 20 times: Chowdhery et al. 2022, section 5.1). A spike is a value more than
    `spike_deviations` standard deviations above the mean of the last `spike_window` steps
    (`run.trainer.anomaly_detector`).
    """

    steps: int
    data: tuple[WeightedSource, ...] = ()
    learning_rate: float = 3e-4
    schedule: LearningRateSchedule = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    final_fraction: float = 0.1
    optimizer: Mapping[str, float] = field(default_factory=dict)
    clip_norm: float | None = 1.0
    loss_scale: float = 2.0**16  # this and the next three: torch.amp.GradScaler
    loss_scale_growth: float = 2.0
    loss_scale_backoff: float = 0.5
    loss_scale_interval: int = 2000
    amax_history: int = 1024  # this and the next two: Transformer Engine, DelayedScaling
    amax_algorithm: AmaxAlgorithm = "max"
    amax_margin: int = 0
    seed: int = 0
    reduction: GradientReduction = "bucketed"
    bucket_bytes: int = BUCKET_BYTES
    reduce_each_micro_batch: bool = False
    batch_ramp: tuple[tuple[int, int], ...] = ()
    batch_schedule: str | None = None
    batch_lr: BatchLrRule = "none"
    to_loss: float | None = None
    balance: BalanceMethod = "auxiliary"
    balance_coefficient: float = 0.01
    balance_rate: float = 1e-3
    capacity_factor: float | None = None
    prediction_weight: float = 0.3  # DeepSeek-AI 2025 (DeepSeek-V3), section 4.2; 0.1 for the last third of its tokens
    respect_documents: bool = False
    validate_every: int = 0
    noise_scale_every: int = 0
    checkpoint_every: int = 0
    keep_checkpoints: int = 2
    keep_every: int = 0
    silent_after_s: float = 30.0
    slow_factor: float = 2.0  # ranks with the same work: on a host whose cores others use too they differ by less
    timeout_s: float = 600.0
    initial: str | None = None
    non_finite: AnomalyAction = "stop"
    loss_spike: AnomalyAction = "ignore"
    norm_spike: AnomalyAction = "ignore"
    spike_window: int = SPIKE_WINDOW
    spike_deviations: float = SPIKE_DEVIATIONS
    max_rewinds: int = 20
    max_restarts: int = 3

    def __post_init__(self) -> None:
        raise_problems([f"recipe: {problem} is required" for problem in (*self._problems(), *self.delayed.problems())])

    def _problems(self) -> Iterator[str]:
        for name in ("steps", "bucket_bytes", "keep_checkpoints", "loss_scale_interval"):
            if getattr(self, name) < 1:
                yield f"{name} is {getattr(self, name)}; at least 1"
        for name in (
            "warmup_steps", "decay_steps", "validate_every", "checkpoint_every", "keep_every", "max_rewinds",
            "noise_scale_every", "max_restarts",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                yield f"{name} is {getattr(self, name)}; at least 0"
        choices: dict[str, tuple[str, ...]] = {
            "schedule": LR_SCHEDULES, "reduction": GRADIENT_REDUCTIONS, "balance": BALANCE_METHODS,
            "batch_lr": tuple(BATCH_LR_RULES),
        }  # fmt: skip
        # A step that is not finite cannot be ignored.
        choices |= dict.fromkeys(POLICIES, ACTIONS) | {NON_FINITE: ACTIONS[1:]}
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                yield f"{name} is {getattr(self, name)!r}; one of {', '.join(allowed)}"
        for name, low, high in (
            ("learning_rate", 0.0, 1e3), ("final_fraction", 0.0, 1.0), ("balance_coefficient", 0.0, 1e3),
            ("balance_rate", 0.0, 1e3), ("silent_after_s", 0.1, 1e6), ("slow_factor", 1.0, 1e6), ("timeout_s", 0.1, 1e6),
            ("loss_scale", 1.0, 2.0**32), ("loss_scale_growth", 1.0, 2.0**16), ("loss_scale_backoff", 2.0**-16, 1.0),
        ):  # fmt: skip
            if not low <= getattr(self, name) <= high:
                yield f"{name} is {getattr(self, name)!r}; a number of {low:g} to {high:g}"
        if self.batch_ramp and self.batch_schedule is not None:
            yield f"batch_schedule is {self.batch_schedule!r} beside a batch_ramp; one of the two"
        if self.to_loss is not None and not 0 < self.to_loss < math.inf:
            yield f"to_loss is {self.to_loss!r}; a number of nats above 0, or none at all,"
        if self.spike_window < 2:
            yield f"spike_window is {self.spike_window}; at least 2 steps, which have a standard deviation,"
        if not 0 < self.spike_deviations <= 1e3:
            yield f"spike_deviations is {self.spike_deviations!r}; a number above 0, at most 1000,"
        if not 0 < self.prediction_weight <= 1e3:
            yield f"prediction_weight is {self.prediction_weight!r}; a number above 0, at most 1000,"
        if self.capacity_factor is not None and not 0 < self.capacity_factor <= 1e3:
            yield f"capacity_factor is {self.capacity_factor!r}; a number above 0, at most 1000, or none at all,"
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            yield f"clip_norm is {self.clip_norm!r}; a positive number, or none at all,"
        if self.warmup_steps + self.decay_steps > self.steps:
            yield f"warmup_steps + decay_steps are {self.warmup_steps + self.decay_steps}; at most the {self.steps} steps"

    @property
    def policies(self) -> dict[str, AnomalyAction]:
        """The action of each anomaly policy, by its name."""
        return {NON_FINITE: self.non_finite, LOSS_SPIKE: self.loss_spike, NORM_SPIKE: self.norm_spike}

    @property
    def delayed(self) -> DelayedScaling:
        """The rule by which FP8 scales follow from earlier steps."""
        return DelayedScaling(history=self.amax_history, algorithm=self.amax_algorithm, margin=self.amax_margin)

    def measures_noise_at(self, step: int) -> bool:
        """Return whether the noise scale is measured in a step, counted from 0."""
        return self.noise_scale_every > 0 and (step + 1) % self.noise_scale_every == 0

    def for_step(self, step: int) -> TrainingRecipe:
        """Return the recipe for the collectives of one step, counted from 0: without noise scale where it is not
        measured."""
        return self if self.measures_noise_at(step) else replace(self, noise_scale_every=0)

    def learning_rate_at(self, step: int, batch_ratio: float = 1.0) -> float:
        """Return the learning rate of a step, counted from 0, whose batch is `batch_ratio` times the plan's.

        The first step of a warm-up has a rate above 0. Sources: Loshchilov and Hutter 2017 (cosine); Hu et al. 2024,
        MiniCPM (WSD: warm-up, stable, decay).
        """
        peak_rate = self.learning_rate * math.pow(batch_ratio, BATCH_LR_RULES[self.batch_lr])
        if step < self.warmup_steps:
            return peak_rate * (step + 1) / self.warmup_steps
        return peak_rate * self._decay_factor(step)

    def _decay_factor(self, step: int) -> float:
        match self.schedule:
            case "cosine":
                progress = (step - self.warmup_steps) / max(self.steps - 1 - self.warmup_steps, 1)
                return self._towards_final(0.5 * (1.0 + math.cos(math.pi * min(progress, 1.0))))
            case "wsd":
                remaining_steps = self.steps - 1 - step
                if remaining_steps >= self.decay_steps:
                    return 1.0
                return self._towards_final(max(remaining_steps, 0) / self.decay_steps)
            case "constant":
                return 1.0
            case _:
                assert_never(self.schedule)

    def _towards_final(self, remaining: float) -> float:
        """Interpolate between the final fraction (`remaining` 0) and the full rate (1)."""
        return self.final_fraction + (1.0 - self.final_fraction) * remaining


def recipe_payload(recipe: TrainingRecipe, optimizer: str) -> dict[str, Any]:
    """Return the values of a recipe that a run's folder keeps, with all hyperparameters of the plan's optimizer."""
    payload = asdict(recipe)
    hyperparameters = get_optimizer(optimizer).resolve_hyperparameters(payload.pop("optimizer"))
    return {**payload, **hyperparameters}


def parse_recipe(payload: Mapping[str, Any], label: str) -> TrainingRecipe:
    """Return the recipe of a payload. Raises `InputError` that names each wrong field after `label`."""
    from shardwise.values import parse_dataclass  # loads pydantic, which `train --help` does without

    field_names = {recipe_field.name for recipe_field in fields(TrainingRecipe)} - {"optimizer"}
    settings = {name: value for name, value in payload.items() if name in field_names}
    return parse_dataclass(
        TrainingRecipe,
        {**settings, "optimizer": {name: payload[name] for name in optimizer_fields() if name in payload}},
        label,
    )


WeightedSource = tuple[str, float]  # a folder and its weight


def parse_source(text: str) -> WeightedSource:
    """Return the folder and weight of a `--data` value: DIR, of weight 1, or DIR=WEIGHT.

    Raises `InputError` for a weight that is not positive.

    >>> parse_source("data"), parse_source("shards/code=0.3")
    (('data', 1.0), ('shards/code', 0.3))
    """
    folder, equals, weight_text = text.rpartition("=")
    if not equals or Path(text).is_dir():
        return text, 1.0
    weight = parse_quantity(weight_text, label="--data", unit="")
    if not folder or not 0 < weight < math.inf:
        raise InputError(
            f"--data: found {text!r}; DIR or DIR=WEIGHT, with a weight above 0, is required, such as data=0.7"
        )
    return folder, weight


def source_flags(sources: Sequence[WeightedSource]) -> list[str]:
    """Return the `--data` flags of sources."""
    source_texts = [folder if weight == 1.0 else f"{folder}={weight!r}" for folder, weight in sources]
    return [argument for source in source_texts for argument in ("--data", source)]


def source_names(sources: Sequence[WeightedSource]) -> tuple[str, ...]:
    """Return the name of each source in logs and summaries: its folder's name, or the whole path where two share a
    name.

    >>> source_names([("a/web", 1.0), ("a/code", 1.0)]), source_names([("a/en", 1.0), ("b/en", 1.0)])
    (('web', 'code'), ('a/en', 'b/en'))
    """
    folder_names = [Path(folder).name or folder for folder, _ in sources]
    counts = Counter(folder_names)
    return tuple(name if counts[name] == 1 else folder for name, (folder, _) in zip(folder_names, sources, strict=True))


def require_distinct_sources(sources: Sequence[WeightedSource]) -> None:
    """Raise `InputError` if a folder is given twice."""
    counts = Counter(Path(folder) for folder, _ in sources)
    repeated = [str(folder) for folder, count in counts.items() if count > 1]
    if repeated:
        raise InputError(
            f"--data: found {', '.join(repeated)} more than once; each folder once, with its weight, is required"
        )


AnomalyAction = Literal["ignore", "stop", "skip", "rewind"]
ACTIONS: tuple[AnomalyAction, ...] = ("ignore", "stop", "skip", "rewind")
NON_FINITE, LOSS_SPIKE, NORM_SPIKE = POLICIES = ("non_finite", "loss_spike", "norm_spike")

Device = Literal["auto", "cpu", "cuda"]
DEVICES: tuple[Device, ...] = ("auto", "cpu", "cuda")
