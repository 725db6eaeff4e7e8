"""Launches of Megatron-LM, judged by its own parser, its own checks and the configurations that it makes of the arguments.

    python benchmarks/export_check/megatron.py --megatron CHECKOUT FOLDER...

CHECKOUT is a checkout of Megatron-LM, each FOLDER holds launches that `shardwise export --to megatron --out FOLDER` wrote. The
script itself is run by bash, with a torchrun that prints its words. Prints a line for each that is refused; status 1 where one
is. Needs PyTorch and packaging; Triton, einops and Transformer Engine are stubbed, and the device answers as an H100 would.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import subprocess
import sys
import tempfile
import traceback
import typing
from pathlib import Path

from launch_verdicts import find_launches, launch_arguments, print_refusals
from stubs import stub

TORCHRUN = '#!/bin/bash\nprintf \'%s\\0\' "${CUDA_DEVICE_MAX_CONNECTIONS:-}" "$@"\n'
YOURS = {"DATA_PATH": "data", "TOKENIZER": "tokenizer", "LR": "3e-4", "HEAD_NODE": "node0", "MEGATRON": "/megatron"}
VERSIONS = {"triton": "3.5.0", "einops": "0.8.1", "transformer_engine": "2.12.0"}


def words_of(folder: Path) -> list[str]:
    """The words that a launch gives to torchrun; the first is CUDA_DEVICE_MAX_CONNECTIONS."""
    with tempfile.TemporaryDirectory() as tools:
        torchrun = Path(tools, "torchrun")
        torchrun.write_text(TORCHRUN, encoding="utf-8")
        torchrun.chmod(0o755)
        environment = {**os.environ, **YOURS, "PATH": f"{tools}:{os.environ['PATH']}"}
        script = ["bash", str(folder / "launch.sh")]
        done = subprocess.run(script, capture_output=True, text=True, env=environment, check=True)
    return done.stdout.split("\0")[:-1]


def problem(words: list[str]) -> str | None:
    """Why Megatron-LM refuses a launch; None where it takes it."""
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import add_megatron_arguments, validate_args
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    launcher = dict(itertools.pairwise(words[1:at]))
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = words[0]
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    add_megatron_arguments(parser)
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            args = parser.parse_args(words[at + 1 :])
            args.rank, args.world_size = 0, int(launcher["--nnodes"]) * int(launcher["--nproc-per-node"])
            validate_args(args)
            core_transformer_config_from_args(args)
            get_megatron_ddp_config(args)
            get_megatron_optimizer_config(args)
    except (Exception, SystemExit) as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        reason = str(error).strip() or where.line
        return f"{reason} ({Path(where.filename).name}:{where.lineno})"
    return None


def stub_device() -> None:
    """Stub the packages of accelerators, and let the device answer as an H100 would."""
    import torch

    stub(VERSIONS)
    if not hasattr(typing, "override"):  # of Python 3.12
        typing.override = lambda method: method  # type: ignore[attr-defined]
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device=None: type("H100", (), {"major": 9, "minor": 0})()  # type: ignore


def main() -> int:
    options = launch_arguments(__doc__)
    options.add_argument("--megatron", required=True, metavar="CHECKOUT")
    chosen = options.parse_args()
    sys.path[0] = chosen.megatron  # in the place of this folder, whose files have the frameworks' names
    stub_device()
    return print_refusals(find_launches(chosen.folders, "launch.sh"), lambda folder: problem(words_of(folder)))


if __name__ == "__main__":
    sys.exit(main())
