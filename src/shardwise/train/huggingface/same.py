"""Whether a folder of `transformers` has the model of a plan."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

from shardwise.errors import InputError, require
from shardwise.model.architecture import Architecture
from shardwise.train.huggingface.config import read_config
from shardwise.train.huggingface.writing import CONFIG

ABOUT = ("name", "source")  # of an architecture what says nothing of the model itself


def require_same(folder: str | Path, architecture: Architecture) -> None:
    """Raise `InputError` where the folder's model is another one than the plan's, in its weights or its numerics."""
    path = Path(folder) / CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"--from: cannot read {path}: {error}; a folder of a Hugging Face model is required") from None
    found, _ = read_config(config, name=architecture.name)
    require(
        [
            f"--from: {path} has {field.name} = {getattr(found, field.name)!r}; the plan's model has "
            f"{getattr(architecture, field.name)!r}, which is required: plan for {path}"
            for field in fields(Architecture)
            if field.name not in ABOUT and getattr(found, field.name) != getattr(architecture, field.name)
        ]
    )
