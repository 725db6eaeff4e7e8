"""Whether DeepSpeed takes the ds_config.json files of written launches.

    pip install deepspeed==0.19.8   # DS_BUILD_OPS=0: its kernels are not needed
    python benchmarks/export_check/deepspeed.py FOLDER

FOLDER holds folders that `shardwise export --to deepspeed --out` wrote, or is one. `DeepSpeedConfig` reads each of them for as
many ranks as its launch.sh starts; expert parallelism is validated as the engine does. Prints what was refused, with the reason.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from unittest import mock

from launch_verdicts import find_launches, launch_arguments, print_refusals

sys.path.pop(0)  # this folder, whose scripts have the names of what they import
import deepspeed.comm
from deepspeed.module_inject.auto_ep_config import validate_autoep_config
from deepspeed.runtime.config import DeepSpeedConfig


def num_devices(folder: Path) -> int:
    """Ranks that the launch script starts."""
    text = (folder / "launch.sh").read_text(encoding="utf-8")
    nodes = re.search(r"--num_nodes (\d+)", text)
    return int(re.findall(r"--num_gpus (\d+)", text)[0]) * int(nodes[1] if nodes else 1)


def refused(folder: Path) -> str | None:
    """Why DeepSpeed does not take a launch; None where it does."""
    config = json.loads((folder / "ds_config.json").read_text(encoding="utf-8"))
    world, tp = num_devices(folder), config.get("tensor_parallel", {}).get("autotp_size", 1)
    sp = config.get("sequence_parallel_size", 1)
    with (
        mock.patch.object(deepspeed.comm, "get_rank", return_value=0),
        mock.patch.object(deepspeed.comm, "get_world_size", return_value=world // tp),
    ):
        try:
            parsed = DeepSpeedConfig(config)
            assert parsed.train_micro_batch_size_per_gpu == config["train_micro_batch_size_per_gpu"]
            assert int(parsed.zero_optimization_stage) == config["zero_optimization"]["stage"]
            validate_autoep_config(
                parsed.expert_parallel_config, world, 1, tp, sp, zero_stage=parsed.zero_optimization_stage
            )
        except (Exception, SystemExit) as error:
            return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    return print_refusals(find_launches(launch_arguments(__doc__).parse_args().folders, "ds_config.json"), refused)


if __name__ == "__main__":
    sys.exit(main())
