"""Launches of MaxText, judged by its own configuration: pyconfig, its base.yml and models, and the checks of MaxTextConfig.

    python benchmarks/export_check/maxtext.py --maxtext CHECKOUT FOLDER...

CHECKOUT is a checkout of MaxText, each FOLDER holds launches that `shardwise export --to maxtext` (or maxtext-gpu) wrote. There
are as many devices and slices as the degrees take. All are parsed by one process, about three a second. Prints a line for each
that is refused, and their count; status 1 where one is. Needs JAX, pydantic, PyYAML, omegaconf, packaging and jinja2; what else
MaxText imports is stubbed.
"""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import shlex
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from launch_verdicts import find_launches, launch_arguments, print_refusals
from stubs import stub

PROGRAM = "maxtext.trainers.pre_train.train"
STUBBED = (
    "flax", "orbax", "google", "grain", "tensorflow", "aqt", "qwix", "pathwaysutils", "tensorboardX", "psutil", "etils",
    "cloud_tpu_diagnostics", "cloud_accelerator_diagnostics", "ml_goodput_measurement", "optax", "huggingface_hub", "tokamax",
    "absl", "datasets", "transformers", "sentencepiece", "tiktoken", "tunix", "safetensors", "gcsfs",
)  # fmt: skip


# Print the command that xpk would run on the slices, or the arguments of python3.
TOOLS = {
    "xpk": '#!/bin/bash\nwhile [ "$1" != --command ]; do shift; done; echo "$2"\n',
    "python3": '#!/bin/bash\nprintf "%q " "$@"\n',
}


def command_words(folder: Path) -> list[str]:
    """Return the arguments that a launch's script gives to MaxText: the configuration's path and what it sets besides."""
    with tempfile.TemporaryDirectory() as tools:
        for name, text in TOOLS.items():
            Path(tools, name).write_text(text, encoding="utf-8")
            Path(tools, name).chmod(0o755)
        variables = {
            "CLUSTER": "c",
            "RUN_NAME": "r",
            "OUTPUT": tools,
            "CONFIG": str(folder / "config.yml"),
            "MAXTEXT": tools,
        }
        environment = {**os.environ, **variables, "PATH": f"{tools}:{os.environ['PATH']}"}
        words = ["bash", str(folder / "launch.sh")]
        printed = subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout
    words = shlex.split(printed)
    return [word for word in words[words.index(PROGRAM) + 1 :] if not word.startswith("base_output_directory=")]


def problem(pyconfig: Any, folder: Path) -> str | None:
    """Why MaxText refuses a launch; None where it takes it."""
    path = folder / "config.yml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    devices, slices = (
        math.prod(value for name, value in settings.items() if name.startswith(kinds) and name.endswith("_parallelism"))
        for kinds in (("ici_", "dcn_"), "dcn_")
    )
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            parsed = pyconfig._initialize_pydantic(
                ["train", *command_words(folder)], internal_compile=True, internal_compile_num_devices=devices, num_slices=slices,
                jax_cache_dir="", log_config=False,
            )  # fmt: skip
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    batch_tokens = settings["per_device_batch_size"] * devices * settings.get("gradient_accumulation_steps", 1)
    return (
        None
        if parsed.global_batch_size_to_train_on == batch_tokens
        else f"a batch of {parsed.global_batch_size_to_train_on}"
    )


def main() -> int:
    options = launch_arguments(__doc__)
    options.add_argument("--maxtext", required=True, metavar="CHECKOUT")
    chosen = options.parse_args()
    sys.path[0] = str(
        Path(chosen.maxtext, "src")
    )  # in the place of this folder, whose files have the frameworks' names
    stub(dict.fromkeys(STUBBED, "1.0"))
    logging.disable(logging.CRITICAL)
    from maxtext.configs import pyconfig

    pyconfig.max_utils.maybe_initialize_jax_distributed_system = lambda keys: None
    return print_refusals(find_launches(chosen.folders, "config.yml"), partial(problem, pyconfig))


if __name__ == "__main__":
    sys.exit(main())
