"""Random small models, written for a framework: what the judges beside this file load. Each is in a folder of its own.

PYTHONPATH=src:tests python benchmarks/weights_check/write.py FORMAT COUNT FOLDER

`model.json` has the sizes, `degrees.json` degrees to load it on (1 where the framework is loaded on one process), `expected.pt`
token ids and the logits that the model makes of them in float64, `weights/` the files in the framework's names.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import torch
from conversion.random_models import random_models, random_weights

from shardwise.interop.frameworks.megatron.weight_names import DISTRIBUTED_NAMES, STACKED, megatron_weight_table
from shardwise.interop.frameworks.torchtitan.models import torchtitan_model
from shardwise.interop.weights.distributed_checkpoints import write_megatron
from shardwise.interop.weights.distributed_checkpoints import write_torchtitan as write_titan
from shardwise.interop.weights.megatron_rank_files import RankDegrees, write_megatron_ranks
from shardwise.interop.weights.stored_model import boxes_of_weights
from shardwise.interop.weights.stored_slices import WeightSource
from shardwise.model.architecture import Architecture
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.values.errors import InputError

POSITIONS, DIVISIBLE = 9, 8
DEGREES = ((1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (1, 1, 2), (1, 2, 2))  # tp, pp, ep
Writer = Callable[[Path, ModelWeights, RankDegrees], None]


def of_megatron(model: Architecture) -> None:
    """Raise `InputError` for a model that Megatron-Core does not compute, or not on a CPU: its own modules have no latent
    attention whose queries come from no latent, and its attention with sinks no tensor parallelism."""
    megatron_weight_table(model, DISTRIBUTED_NAMES[0], STACKED)
    if model.kv_lora_rank and not model.q_lora_rank:
        raise InputError("q_lora_rank = 0")


def source_of(weights: ModelWeights) -> WeightSource:
    return WeightSource(weights.architecture, boxes_of_weights(weights), weights.dtype)


def write_torchtitan(folder: Path, weights: ModelWeights, degrees: RankDegrees) -> None:
    write_titan(folder, source_of(weights))


def write_distributed(folder: Path, weights: ModelWeights, degrees: RankDegrees) -> None:
    write_megatron(folder, source_of(weights))


def write_ranks(folder: Path, weights: ModelWeights, degrees: RankDegrees) -> None:
    write_megatron_ranks(folder, source_of(weights), degrees=degrees, implementation="local")


FORMATS: Mapping[str, tuple[Callable[[Architecture], object], Writer]] = {
    "torchtitan": (torchtitan_model, write_torchtitan),
    "megatron": (of_megatron, write_distributed),
    "megatron-ranks": (of_megatron, write_ranks),
}


def random_degrees(model: Architecture, rng: random.Random) -> RankDegrees:
    """Those of ranks that can have the model."""
    while True:
        tp, pp, ep = rng.choice(DEGREES)
        degrees = RankDegrees(tp=tp, pp=pp, ep=ep, divisible=DIVISIBLE)
        try:
            degrees.require(model)
        except InputError:
            continue
        return degrees


def main(name: str, count: str, folder: str) -> None:
    accepts, write = FORMATS[name]
    rng = random.Random(7)
    for number, model in enumerate(islice(random_models(accepts, 7), int(count))):
        model_folder = Path(folder, f"{number:03}")
        model_folder.mkdir(parents=True, exist_ok=True)
        weights, degrees = random_weights(model, number, torch.float64), random_degrees(model, rng)
        ids = torch.randint(0, model.vocab_size, (2, POSITIONS), generator=torch.Generator().manual_seed(number))
        (model_folder / "model.json").write_text(json.dumps(asdict(model)), encoding="utf-8")
        (model_folder / "degrees.json").write_text(json.dumps(asdict(degrees)), encoding="utf-8")
        torch.save({"ids": ids, "logits": weights.logits(ids)}, model_folder / "expected.pt")
        write(model_folder / "weights", weights, degrees)


if __name__ == "__main__":
    main(*sys.argv[1:])
