"""Launches of MaxText, judged by its own configuration: pyconfig, its base.yml and models, and the checks of MaxTextConfig.

    python benchmarks/export_check/maxtext.py --maxtext CHECKOUT FOLDER...

CHECKOUT is a checkout of MaxText, each FOLDER holds a launch that `shardwise export --to maxtext` (or maxtext-gpu) wrote. There
are as many devices and slices as the degrees take. Prints a line for each; status 1 where one is refused. Needs JAX, pydantic,
PyYAML, omegaconf, packaging and jinja2; what else MaxText imports is stubbed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import math
import sys
from pathlib import Path
from typing import Any

import yaml
from stubs import stub

STUBBED = (
    "flax", "orbax", "google", "grain", "tensorflow", "aqt", "qwix", "pathwaysutils", "tensorboardX", "psutil", "etils",
    "cloud_tpu_diagnostics", "cloud_accelerator_diagnostics", "ml_goodput_measurement", "optax", "huggingface_hub", "tokamax",
    "absl", "datasets", "transformers", "sentencepiece", "tiktoken", "tunix", "safetensors", "gcsfs",
)  # fmt: skip


def problem(pyconfig: Any, folder: Path) -> str | None:
    """Why MaxText refuses a launch; None where it takes it."""
    path = folder / "config.yml"
    given = yaml.safe_load(path.read_text(encoding="utf-8"))
    devices, slices = (
        math.prod(value for name, value in given.items() if name.startswith(kinds) and name.endswith("_parallelism"))
        for kinds in (("ici_", "dcn_"), "dcn_")
    )
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            found = pyconfig._initialize_pydantic(
                ["train", str(path)], internal_compile=True, internal_compile_num_devices=devices, num_slices=slices,
                jax_cache_dir="", log_config=False,
            )  # fmt: skip
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    wanted = given["per_device_batch_size"] * devices * given.get("gradient_accumulation_steps", 1)
    return (
        None if found.global_batch_size_to_train_on == wanted else f"a batch of {found.global_batch_size_to_train_on}"
    )


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--maxtext", required=True, metavar="CHECKOUT")
    options.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    chosen = options.parse_args()
    sys.path[0] = str(
        Path(chosen.maxtext, "src")
    )  # in the place of this folder, whose files have the frameworks' names
    stub(dict.fromkeys(STUBBED, "1.0"))
    logging.disable(logging.CRITICAL)
    from maxtext.configs import pyconfig

    pyconfig.max_utils.maybe_initialize_jax_distributed_system = lambda keys: None
    found = {folder: problem(pyconfig, folder) for folder in chosen.folders}
    for folder, reason in found.items():
        print(f"{folder}: {'accepted' if reason is None else f'refused: {reason}'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
