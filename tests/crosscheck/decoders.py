"""The causal language models that `transformers` defines, each with what becomes of its default config here.

Run as a script, it writes `decoders.csv` again: `python tests/crosscheck/decoders.py`. States: `exact` (as many parameters as
the model that `transformers` builds, to the last one), `refused` (with the reason), `unbuildable` (`transformers` builds no model
of its own default config), `no decoder` (an encoder, or the decoder of an encoder-decoder). A state `different` is a fault.
"""

from __future__ import annotations

import csv
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from shardwise.model.huggingface.config import LANGUAGE_KEYS, parse_config
from shardwise.model.parameters_and_flops import num_params
from shardwise.values.errors import InputError

TABLE = Path(__file__).parent / "decoders.csv"
ENCODER = "an encoder; its causal form is for the decoder of another"
ENCODER_DECODER = "the decoder of an encoder-decoder, with keys and values of another sequence"
NO_DECODERS: Mapping[str, str] = {
    **dict.fromkeys(
        ("bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "reformer",
         "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl", "xlnet",
         "xmod"), ENCODER),
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart", "prophetnet",
         "trocr", "whisper"), ENCODER_DECODER),
}  # fmt: skip
# What a default config leaves open and its model needs, or names that are the same model.
REQUIRED_KEYS: Mapping[str, Mapping[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 16},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48},
}
FIRST_YEAR = 2022  # of the code's copyright: what is older is listed, and not counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """One row: a `model_type`, its class, the year of its code, and the state of its default config."""

    model_type: str
    model_class: str
    year: int
    state: str
    num_params: int | None
    reason: str


def build_meta_model(model_type: str, keys: Mapping[str, Any]) -> tuple[dict[str, Any], torch.nn.Module]:
    """Return a config with some keys, as `transformers` completes it, and its model without memory for its parameters."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(model_type, **keys)
        completed: dict[str, Any] = {**config.to_dict(), "model_type": model_type}
        with torch.device("meta"):
            return completed, transformers.AutoModelForCausalLM.from_config(config)


def complete_config(model_type: str) -> dict[str, Any]:
    """Return the default config of a type, with what it leaves open and its model needs, as `transformers` completes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(model_type, **REQUIRED_KEYS.get(model_type, {}))
        return {**config.to_dict(), "model_type": model_type}


def rotary_angles(config: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the base of the rotary angles of a completed config's layers, and the share of a head that turns, as its model reads
    them; None where it has none. Layers with a window may have others."""
    text = next((config[key] for key in LANGUAGE_KEYS if isinstance(config.get(key), dict)), config)
    if text is not config:
        return rotary_angles(text)
    angles = config.get("rope_parameters") or {}
    angles = angles.get("full_attention") or angles
    if "rope_theta" in angles:
        return angles["rope_theta"], angles.get("partial_rotary_factor", 1.0)
    if config.get("rotary_dim"):  # GPT-J and CodeGen, whose angles have the base 10,000 in their code
        return 10_000.0, config["rotary_dim"] / (config["n_embd"] // config["n_head"])
    return None


def text_params(model: torch.nn.Module) -> int:
    """Return the parameters of a model without its towers of images and sound, what projects these, and layers that attend to
    them alone."""
    named = dict(model.named_parameters())
    image_layers = tuple(name.partition("cross_attn.")[0] for name in named if ".cross_attn." in name)
    towers = re.compile(r"(vision|image|audio|multi_modal|embed_(vision|audio)|visual)")
    return sum(
        parameter.numel()
        for name, parameter in named.items()
        if not towers.search(name) and not (image_layers and name.startswith(image_layers))
    )


def classify(model_type: str) -> tuple[str, int | None, str]:
    """Return the state of a family's default config, its parameters and the reason for its state."""
    if model_type in NO_DECODERS:
        return "no decoder", None, NO_DECODERS[model_type]
    try:
        config, model = build_meta_model(model_type, REQUIRED_KEYS.get(model_type, {}))
    except Exception as error:  # whatever its code raises for its own defaults
        return "unbuildable", None, re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:120]
    theirs = text_params(model)
    try:
        ours = num_params(parse_config(config))
    except InputError as error:
        return "refused", theirs, re.sub(r"^.*not planned for: it has (.*); another.*$", r"\1", str(error))[:160]
    return "exact" if ours == theirs else "different", theirs, "" if ours == theirs else f"{ours} parameters here"


def code_year(model_type: str) -> int:
    """Return the last year in the copyright lines of a family's modelling code, or of its other code where that has none;
    `FIRST_YEAR` for one that has none at all, as some new ones."""
    import transformers
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    folder = Path(transformers.__file__).parent / "models" / model_type_to_module_name(model_type)
    for pattern in ("modeling_*.py", "*.py"):
        heads = (file.read_text(encoding="utf-8")[:1500] for file in folder.glob(pattern))
        years = [int(year) for head in heads for year in re.findall(r"Copyright.{0,6}(20\d\d)", head)]
        if years:
            return max(years)
    return FIRST_YEAR


def list_decoders() -> Iterator[Decoder]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    for model_type, model_class in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        state, params, reason = classify(model_type)
        yield Decoder(
            model_type=model_type, model_class=model_class, year=code_year(model_type), state=state, num_params=params,
            reason=reason,
        )  # fmt: skip


def read_decoders() -> list[Decoder]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [
            Decoder(**{**row, "year": int(row["year"]), "num_params": int(row["num_params"]) if row["num_params"] else None})
            for row in csv.DictReader(file)
        ]  # fmt: skip


def counted(decoders: list[Decoder]) -> list[Decoder]:
    """Return the decoders since `FIRST_YEAR` of which `transformers` builds a model."""
    return [row for row in decoders if row.year >= FIRST_YEAR and row.state not in ("no decoder", "unbuildable")]


def write_table() -> None:
    decoders = list(list_decoders())
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(decoders[0])), lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(row) for row in decoders)
    rows = counted(decoders)
    exact = sum(row.state == "exact" for row in rows)
    print(f"{exact} of {len(rows)} decoders since {FIRST_YEAR} are exact ({exact / len(rows):.0%})")
    print("different:", ", ".join(row.model_type for row in decoders if row.state == "different") or "none")


if __name__ == "__main__":
    write_table()
