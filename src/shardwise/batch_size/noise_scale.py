"""The noise scale of a gradient as a value: how large, how sure, and where it comes from.

Letters: L loss in nats per token (loss).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.values import (
    FileMessages,
    InputError,
    parse_quantity,
    raise_problems,
    read_json,
    require_number,
    short_repr,
)

NOISE_FILE = "noise.json"  # of a run's folder: what it measured
NOISE_SCHEMA = "shardwise.noise/1"
DEFAULT_SOURCE = "given"
KAPLAN = "Kaplan et al., Scaling Laws for Neural Language Models, 2020, equation 5.3"
MAX_TOKENS = 1e15  # far above any; products with it stay finite


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The noise scale B_noise in tokens, its 90% interval where it was measured, and its source.

    Raises `InputError` for tokens that are not above 0, and for an interval that does not hold them.

    >>> NoiseScale(tokens=1.2e6, interval90=(0.9e6, 1.6e6), source="runs/a").interval90
    (900000.0, 1600000.0)
    """

    tokens: float
    interval90: tuple[float, float] | None = None
    source: str = DEFAULT_SOURCE

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.tokens <= MAX_TOKENS:
            problems.append(f"noise scale: found {self.tokens:g}; tokens above 0, at most {MAX_TOKENS:g}, are required")
        elif self.interval90 and not 0 < self.interval90[0] <= self.tokens <= self.interval90[1]:
            low, high = self.interval90
            problems.append(
                f"noise scale: found an interval of {low:g} to {high:g}; one around {self.tokens:g} is required"
            )
        raise_problems(problems)


def critical_batch_of_loss(loss: float) -> float:
    """Tokens of the critical batch at a loss in nats per token.

    Formula: 2e8 / L^(1 / 0.21). Unit: tokens. Assumes: Transformers on WebText2 with Adam.
    Source: Kaplan et al., Scaling Laws for Neural Language Models, 2020, equation 5.3.
    """
    return float(2e8 / loss ** (1.0 / 0.21))


def published_noise_scale(loss: float, label: str = "loss") -> NoiseScale:
    """Return the noise scale at a loss in nats per token by the law of Kaplan et al. 2020. Raises `InputError` for no loss
    above 0.

    It is a law of one data set (WebText2) and one tokenizer; another corpus may be several times off.

    >>> noise = published_noise_scale(2.5)
    >>> round(noise.tokens), "2020" in noise.source
    (2547285, True)
    """
    if not 0 < loss < 20:
        raise InputError(f"{label}: found {loss:g}; nats per token, above 0 and below 20, are required")
    return NoiseScale(tokens=critical_batch_of_loss(loss), source=f"published law at a loss of {loss:g} ({KAPLAN})")


def parse_noise_scale(noise: str | float | Path | NoiseScale, label: str = "noise scale") -> NoiseScale:
    """Return the noise scale of a text: tokens such as "1.2Mi", or the folder of a run (or its noise.json) that measured one.

    `label` names it in errors. Raises `InputError`.

    >>> parse_noise_scale("1.2Mi").tokens, parse_noise_scale(2e6).source
    (1258291.2, 'given')
    """
    if isinstance(noise, NoiseScale):
        return noise
    path = Path(noise) if isinstance(noise, str | Path) else None
    if path is not None and (path.exists() or path.suffix == ".json"):
        return read_noise_scale(path / NOISE_FILE if path.is_dir() else path)
    if isinstance(noise, Path):
        raise InputError(f"{label}: {noise} does not exist; the folder of a run that measured it is required")
    try:
        tokens = parse_quantity(noise, label=label, unit="")
    except InputError:
        raise InputError(
            f"{label}: found {noise!r}; tokens such as 1.2Mi, or the folder of a run with a {NOISE_FILE}, are required"
        ) from None
    if not 0 < tokens <= MAX_TOKENS:
        raise InputError(f"{label}: found {noise!r}; tokens above 0, at most {MAX_TOKENS:g}, are required")
    return NoiseScale(tokens=tokens)


def read_noise_scale(path: Path) -> NoiseScale:
    """Return the noise scale that a run measured, from its `noise.json`. Raises `InputError` for any other file."""
    fields = read_json(path, FileMessages(fix="a run that measured the noise scale is required"), finite=True)
    return _parse_noise_file(fields, path)


def _parse_noise_file(fields: Any, path: Path) -> NoiseScale:
    if not isinstance(fields, Mapping) or fields.get("schema") != NOISE_SCHEMA:
        schema = fields.get("schema") if isinstance(fields, Mapping) else fields
        raise InputError(f"{path}: found schema {short_repr(schema)}; {NOISE_SCHEMA!r} is required")
    interval, messages = fields.get("interval90"), FileMessages(f"{path}: ")
    if interval is not None and not (isinstance(interval, list) and len(interval) == 2):
        raise messages.fail(f"found interval90 {short_repr(interval)}; two numbers or null are required")
    numbers = [require_number(fields.get("tokens"), "tokens", messages)]
    numbers += [require_number(bound, "interval90", messages) for bound in interval or ()]
    return NoiseScale(
        tokens=float(numbers[0]), interval90=(float(numbers[1]), float(numbers[2])) if interval else None,
        source=f"measured: {path}",
    )  # fmt: skip


def noise_payload(noise: NoiseScale) -> dict[str, Any]:
    """Return the content of `noise.json`."""
    return {
        "schema": NOISE_SCHEMA, "tokens": noise.tokens,
        "interval90": list(noise.interval90) if noise.interval90 else None, "source": noise.source,
    }  # fmt: skip
