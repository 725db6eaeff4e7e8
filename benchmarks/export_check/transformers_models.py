"""Models of the catalogue as transformers builds them of a written config.json: tensors, and logits in float64.

    PYTHONPATH=src python benchmarks/export_check/transformers_models.py [--count 300] [MODEL...]

Each model that `shardwise convert --to hf` writes is built on the meta device. Tensors that `save_pretrained` would store have
the names and shapes of our table; of modules of multi-token prediction, which transformers lacks, it says that it leaves them
aside. Of each there is a narrow copy too, with the constants of its arithmetic (epsilons, angles, scales, caps, router), saved
and loaded: its logits are ours, and its config reads back as the same model. `--count` further narrow models have random sizes
and constants.
Prints a line for each model; status 1 where anything differs. Needs PyTorch and transformers.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from model_verdicts import (
    NOT_EXPORTED,
    ModelVerdict,
    chosen_models,
    compare_shapes,
    describe_problems,
    model_arguments,
    narrow_model,
    print_verdicts,
)

from shardwise.interop.frameworks.huggingface_families import read_config, write_config
from shardwise.model import Architecture, load_model, model_names
from shardwise.values import InputError

SEQ_LEN, POSITIONS = 4096, 24
MAX_ERROR = 1e-12  # of the largest logit


def meta_model(config: Mapping[str, Any]) -> Any:
    """Return the model of a config.json, on the meta device."""
    import torch
    import transformers

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        read = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(read)


def tensor_problems(model: Architecture, config: Mapping[str, Any], table: Any) -> list[str]:
    """Return how the tensors that transformers would store differ from those of our table."""
    from transformers.core_model_loading import revert_weight_conversion

    from shardwise.interop.weights.stored_slices import list_slices

    built = meta_model(config)
    tied = {"lm_head.weight"} if model.tied_embeddings else set()
    stored = revert_weight_conversion(built, dict(built.state_dict()))
    theirs = {name: tuple(tensor.shape) for name, tensor in stored.items() if name not in tied}
    aside = [re.compile(pattern) for pattern in built._keys_to_ignore_on_load_unexpected or ()]
    ours = {
        entry.name: tuple(entry.tensor_shape)
        for entry in list_slices(model, table)
        if entry.name in theirs or not any(pattern.search(entry.name) for pattern in aside)
    }
    return compare_shapes(ours, theirs)


def logit_error(model: Architecture, seed: int) -> float:
    """Return the largest difference of logits in float64 to those of transformers, as a share of the largest logit."""
    import torch
    import transformers

    from shardwise.interop.weights.huggingface_folder import save_hf
    from shardwise.run.engine.model_builder import initial_weights

    weights = initial_weights(model, seed, torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.tensors.values():
        tensor.normal_(0.5 if tensor.dim() == 1 else 0.0, 0.3, generator=generator)
    tokens = torch.randint(0, model.vocab_size, (2, POSITIONS), generator=generator)
    with tempfile.TemporaryDirectory() as folder:
        save_hf(weights, folder, seq_len=SEQ_LEN)
        with torch.no_grad(), double_precision():
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
            )
            expected = theirs(tokens).logits
    return float((weights.logits(tokens) - expected).abs().max() / expected.abs().max())


def double_precision() -> Any:
    """Return a mode that computes in float64 where transformers asks for float32: in norms, softmaxes and angles."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Double(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            func = torch.Tensor.double if func is torch.Tensor.float else func
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            named = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
            return func(*args, **named)

    return Double()


def arithmetic_problems(model: Architecture, seed: int) -> Iterator[str]:
    """Yield how a model of small sizes differs: in its logits, or as its config reads back."""
    read, _ = read_config(write_config(model, SEQ_LEN)[0], name=model.name)
    if replace(read, source=model.source) != model:
        yield "its config reads back as another model"
    error = logit_error(model, seed)
    if not error <= MAX_ERROR:
        yield f"logits differ by {error:.1e} of the largest"


def verdict(name: str) -> ModelVerdict:
    """Return the verdict on a model of the catalogue; one that is not written is none of transformers' here."""
    model = load_model(name)
    try:
        config, family = write_config(model, model.max_positions or SEQ_LEN)
    except InputError:
        return ModelVerdict(NOT_EXPORTED, "not written")
    problems = tensor_problems(model, config, family.weight_table)
    problems += arithmetic_problems(narrow_model(model, random.Random(0)), 0)
    return describe_problems(problems, f"{family.model_class}: tensors and logits as here")


@cache
def names_by_family() -> Mapping[str, Sequence[str]]:
    """Return the models of the catalogue that are written, by the class of transformers that they become."""
    names: dict[str, list[str]] = {}
    for name in model_names():
        with contextlib.suppress(InputError):
            names.setdefault(write_config(load_model(name), SEQ_LEN)[1].model_class, []).append(name)
    return names


def random_model(rng: random.Random) -> Architecture:
    """Return a narrow model of a random family with other constants: epsilon, base of the angles, tied embeddings."""
    family = rng.choice(tuple(names_by_family().values()))
    model = narrow_model(load_model(rng.choice(family)), rng)
    numerics = model.numerics
    epsilon, base = rng.choice((1e-5, 1e-6, numerics.norm_epsilon)), rng.choice((1e4, 5e5, numerics.rotary.base))
    numerics = replace(numerics, norm_epsilon=epsilon, rotary=replace(numerics.rotary, base=base))
    return replace(model, numerics=numerics, tied_embeddings=rng.random() < 0.5)


def random_verdict(label: str) -> ModelVerdict:
    """Return the verdict on a narrow model, whose family and sizes follow from a number."""
    rng = random.Random(label)
    while True:
        model = random_model(rng)
        try:
            config, family = write_config(model, SEQ_LEN)
        except InputError:
            continue
        problems = [*tensor_problems(model, config, family.weight_table), *arithmetic_problems(model, int(label))]
        return describe_problems(problems, f"{family.model_class} like {model.name}: as here")


def main() -> int:
    parser = model_arguments(__doc__)
    parser.add_argument("--count", type=int, default=0, help="random narrow models besides (default: 0)")
    options = parser.parse_args()
    del sys.path[0]  # this folder, whose files have the frameworks' names
    warnings.simplefilter("ignore")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return print_verdicts((chosen_models(options), verdict), (map(str, range(options.count)), random_verdict))


if __name__ == "__main__":
    sys.exit(main())
