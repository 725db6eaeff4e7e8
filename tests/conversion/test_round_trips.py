"""Random models written in every format and read again, to the bit; and from one format into another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from conversion.random_models import random_models, random_weights

from shardwise.interop.frameworks.huggingface_families import write_config
from shardwise.interop.frameworks.megatron.weight_names import RANK_NAMES, require_supported
from shardwise.interop.frameworks.torchtitan.models import torchtitan_model
from shardwise.interop.weights.convert import WEIGHT_FORMATS, ConvertOptions, detect_format
from shardwise.interop.weights.megatron_rank_files import RankDegrees
from shardwise.interop.weights.stored_model import StoredModel, boxes_of_stored, boxes_of_weights
from shardwise.interop.weights.stored_slices import WeightSource
from shardwise.model.architecture import Architecture
from shardwise.run.engine.model_builder import ModelWeights
from shardwise.values.boxes import Box, interval_boxes
from shardwise.values.errors import InputError

ACCEPTS: dict[str, Callable[[Architecture], object]] = {
    "huggingface": lambda model: write_config(model, 64), "megatron": require_supported, "megatron-ranks": require_supported,
    "torchtitan": torchtitan_model,
}  # fmt: skip
COUNT = 40
DEGREES = (1, 2)


def choices_of(model: Architecture, rng: random.Random) -> ConvertOptions:
    """Degrees that the model can be split over."""
    while True:
        tp, pp, ep = (rng.choice(DEGREES) for _ in range(3))
        degrees = RankDegrees(tp=tp, pp=pp, ep=ep, divisible=rng.choice((1, 8, 128)))
        try:
            degrees.require(model)
        except InputError:
            continue
        return ConvertOptions(seq_len=64, degrees=degrees, implementation=rng.choice(sorted(RANK_NAMES)))


def models(name: str, seed: int = 5) -> Iterator[Architecture]:
    return islice(random_models(ACCEPTS[name], seed), COUNT)


def write(name: str, folder: Path, weights: ModelWeights, choices: ConvertOptions) -> None:
    WEIGHT_FORMATS[name].write(
        folder, WeightSource(weights.architecture, boxes_of_weights(weights), weights.dtype), choices
    )


def require_equal(stored: StoredModel, weights: ModelWeights) -> None:
    again = stored.weights()
    assert again.tensors.keys() == weights.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in weights.tensors.items())
    assert all(torch.equal(again.biases[name], bias) for name, bias in weights.biases.items())


def without_biases(name: str, weights: ModelWeights) -> ModelWeights:
    """Hugging Face's families with such routers are few; where there is no place for biases, they are left out."""
    keeps = name != "huggingface" or write_config(weights.architecture, 64)[1].balance_bias
    return weights if keeps else ModelWeights(weights.architecture, weights.tensors)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_written_weights_are_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    rng = random.Random(1)
    for number, model in enumerate(models(name)):
        folder = tmp_path / str(number)
        weights, choices = without_biases(name, random_weights(model, number)), choices_of(model, rng)
        write(name, folder, weights, choices)
        assert detect_format(folder, "") is WEIGHT_FORMATS[name]
        require_equal(WEIGHT_FORMATS[name].read(folder, None if name == "huggingface" else model), weights)


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_every_element_has_one_place(name: str, tmp_path: Path) -> None:
    """All boxes of a weight together are the weight, and any interval of it is read by itself."""
    rng = random.Random(2)
    for number, model in enumerate(islice(models(name, 6), 12)):
        weights, choices = without_biases(name, random_weights(model, number)), choices_of(model, rng)
        write(name, tmp_path / str(number), weights, choices)
        stored = WEIGHT_FORMATS[name].read(tmp_path / str(number), None if name == "huggingface" else model)
        for parameter, tensor in weights.tensors.items():
            assert sum(place.box.volume for place in stored.slices[parameter]) == tensor.numel()
            start, stop = sorted(rng.sample(range(tensor.numel() + 1), 2))
            interval = stored.read_flat(parameter, interval_boxes(tuple(tensor.shape), start, stop))
            assert torch.equal(interval, tensor.flatten()[start:stop]), parameter


def test_from_every_format_into_every_other(tmp_path: Path) -> None:
    """A chain through all formats and back leaves each weight as it was."""

    def accepts(model: Architecture) -> None:
        for every in ACCEPTS.values():
            every(model)

    rng, kinds = random.Random(3), Counter[str]()
    for number, model in enumerate(islice(random_models(accepts, 8), 15)):
        weights, choices = without_biases("huggingface", random_weights(model, number)), choices_of(model, rng)
        kinds[torchtitan_model(model).weight_table.title] += 1
        order = rng.sample(sorted(WEIGHT_FORMATS), len(WEIGHT_FORMATS))
        folder = tmp_path / f"{number}-{order[0]}"
        write(order[0], folder, weights, choices)
        for before, after in zip(order, (*order[1:], order[0]), strict=True):
            stored = WEIGHT_FORMATS[before].read(folder, None if before == "huggingface" else model)
            folder = tmp_path / f"{number}-{after}-again"
            WEIGHT_FORMATS[after].write(folder, WeightSource(model, boxes_of_stored(stored), torch.float32), choices)
        require_equal(WEIGHT_FORMATS[order[0]].read(folder, None if order[0] == "huggingface" else model), weights)
    assert len(kinds) > 1


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_weights_are_written_in_another_dtype(name: str, tmp_path: Path) -> None:
    model = Architecture(
        name="a", num_layers=2, d_model=8, d_ff=12, num_heads=2, num_kv_heads=2, head_dim=4, vocab_size=9
    )
    weights = random_weights(model, 1)
    WEIGHT_FORMATS[name].write(
        tmp_path, WeightSource(model, boxes_of_weights(weights), torch.bfloat16), ConvertOptions(seq_len=8)
    )
    stored = WEIGHT_FORMATS[name].read(tmp_path, None if name == "huggingface" else model)
    assert stored.tensors.dtype() == torch.bfloat16
    for parameter, tensor in weights.tensors.items():
        values = stored.read(parameter, Box((0,) * tensor.ndim, tuple(tensor.shape)))
        assert torch.equal(values, tensor.bfloat16())
