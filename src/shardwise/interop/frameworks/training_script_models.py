"""Models of launches whose training script names one, as DeepSpeed's and Accelerate's do."""

from __future__ import annotations

from shardwise.interop.frameworks.huggingface_hub_names import hub_model
from shardwise.interop.launches.launch_scripts import SCRIPT_PREFIX
from shardwise.interop.text_formats.option_tables import Options
from shardwise.model import Architecture

# Names of the model's argument. Sources: transformers' run_clm.py and TRL; OpenRLHF; DeepSpeedExamples.
MODEL_OPTIONS = ("model_name_or_path", "pretrain", "model_name", "model_id", "model")


def script_model_name(options: Options) -> str | None:
    """Return the name of the model that the training script's arguments have."""
    names = (options.get(SCRIPT_PREFIX + name) for name in MODEL_OPTIONS)
    return next((name for name in names if isinstance(name, str) and "$" not in name), None)


def find_script_model(options: Options) -> Architecture | None:
    """Return the catalogue's model of the training script's arguments."""
    name = script_model_name(options)
    return hub_model(name) if name else None
