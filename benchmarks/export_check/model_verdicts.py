"""Parts that judges of models share: shapes beside shapes, a line for each model and a count, narrow copies of models."""

from __future__ import annotations

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from shardwise.model import Architecture, model_names

Shapes = Mapping[str, tuple[int, ...]]
MOST_PRINTED = 3  # differences of a model


EQUAL, DIFFERENT, NOT_BUILT, NOT_EXPORTED = "equal", "different", "not built", "not exported"


class ModelVerdict(NamedTuple):
    """Verdict of a judge on one model: whether it is the framework's too, and what to print of it."""

    outcome: str  # EQUAL, DIFFERENT, or why there is nothing to compare
    text: str


def compare_shapes(ours: Shapes, theirs: Shapes) -> list[str]:
    """Return a sentence for each tensor that one side lacks, or that has another shape there."""
    return [
        f"{name}: {ours.get(name, 'missing')} here, {theirs.get(name, 'missing')} there"
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    ]


def describe_problems(problems: Sequence[str], success: str) -> ModelVerdict:
    """Return the verdict on a model: `success`, or its first problems and how many more there are."""
    if not problems:
        return ModelVerdict(EQUAL, success)
    more = f" ({len(problems) - MOST_PRINTED} more)" if len(problems) > MOST_PRINTED else ""
    return ModelVerdict(DIFFERENT, "; ".join(problems[:MOST_PRINTED]) + more)


Judgement = tuple[Iterable[str], Callable[[str], ModelVerdict]]  # names of models, and what judges each


def print_verdicts(*judgements: Judgement) -> int:
    """Print a line for each model, then how many are equal; return the exit status: 1 where one differs, or none is equal.

    What the framework raises is printed as its refusal, and counts as a difference.
    """
    counts: Counter[str] = Counter()
    for names, judge in judgements:
        for name in names:
            try:
                verdict = judge(name)
            except (Exception, SystemExit) as error:
                text = f"refused: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                verdict = ModelVerdict(DIFFERENT, text)
            counts[verdict.outcome] += 1
            print(f"{name:24}{verdict.text}", flush=True)
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()), flush=True)
    return int(counts[DIFFERENT] > 0 or not counts[EQUAL])


def model_arguments(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for names of models; all of the catalogue without one."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=[], help="all of the catalogue without one")
    return parser


def chosen_models(options: argparse.Namespace) -> Sequence[str]:
    """Return the models that the command line names, or all."""
    return options.models or tuple(model_names())


def narrow_model(model: Architecture, rng: random.Random) -> Architecture:
    """Return a model with small random sizes that has the structure of `model` and the constants of its arithmetic."""
    is_grouped = model.num_heads > model.num_kv_heads
    kv_heads, expert_width = rng.choice((1, 2, 3)), rng.choice((20, 28))
    heads = kv_heads * (rng.choice((2, 3)) if is_grouped else 1)
    width = heads * rng.choice((8, 12, 16))
    sizes: dict[str, Any] = {
        "num_layers": max(model.num_dense_layers + 2, model.global_every + 1, rng.choice((2, 3))), "d_model": width,
        "num_kv_heads": kv_heads, "num_heads": heads, "d_ff": expert_width,
        "vocab_size": rng.choice((48, 52)), "num_predict_layers": 0,
    }  # fmt: skip
    if model.num_experts:
        gating = model.numerics.gating
        in_group = rng.choice((4, 8)) if gating.groups > 1 else rng.choice((8, 12))
        chosen = min(model.experts_per_token, gating.chosen_groups * in_group, 4)
        sizes |= {"num_experts": gating.groups * in_group, "experts_per_token": chosen}
    if model.kv_lora_rank:
        sizes |= {"kv_lora_rank": rng.choice((10, 14)), "q_lora_rank": rng.choice((12, 18)) if model.q_lora_rank else 0}
    numerics = model.numerics
    if numerics.embedding_scale != 1.0:  # √D
        numerics = replace(numerics, embedding_scale=math.sqrt(width))
    return replace(
        model, **sizes, numerics=numerics, nominal_num_params=None,
        dense_d_ff=rng.choice((32, 36)) if model.num_dense_layers else 0,
        shared_expert_width=expert_width if model.shared_expert_width else 0,
        sliding_window=rng.choice((7, 9)) if model.sliding_window else None,
    )  # fmt: skip
