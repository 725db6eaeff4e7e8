"""Whether Accelerate takes the config.yaml files of written launches.

    pip install accelerate==1.15.0 transformers torchao
    python benchmarks/export_check/accelerate.py FOLDER

FOLDER holds folders that `shardwise export --to accelerate --out` wrote, or is one. Each is read as `accelerate launch` reads it,
and `ParallelismConfig` and `FullyShardedDataParallelPlugin` are made of what it hands to the ranks. Prints what was refused.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest import mock

from launch_verdicts import find_launches, launch_arguments, print_refusals

sys.path.pop(0)  # this folder, whose scripts have the names of what they import
from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env


def refused(folder: Path) -> str | None:
    """Why Accelerate does not take a launch; None where it does."""
    path = str(folder / "config.yaml")
    try:
        config = load_config_from_file(path)
        arguments = launch_command_parser().parse_args(["--config_file", path, "--machine_rank", "0", "train.py"])
        arguments, _, _ = _validate_launch_command(arguments)
        arguments.main_process_port = arguments.main_process_port or 29500
        environment = prepare_multi_gpu_env(arguments)
        with mock.patch.dict(os.environ, environment, clear=True):
            if arguments.use_parallelism_config:
                sizes = ParallelismConfig()
                assert sizes.total_size == config.num_processes, f"{sizes.total_size} on {config.num_processes}"
                assert not arguments.use_fsdp or sizes.dp_shard_enabled or sizes.cp_enabled, "nothing to shard over"
            if arguments.use_fsdp:
                plugin = FullyShardedDataParallelPlugin()
                assert plugin.fsdp_version == 2
                assert plugin.reshard_after_forward is config.fsdp_config["fsdp_reshard_after_forward"]
                assert plugin.activation_checkpointing is config.fsdp_config["fsdp_activation_checkpointing"]
                plugin.set_mixed_precision(arguments.mixed_precision.replace("no", "fp32"))
    except (Exception, SystemExit) as error:
        return f"{type(error).__name__}: {error}"
    return None


def main() -> int:
    return print_refusals(find_launches(launch_arguments(__doc__).parse_args().folders, "config.yaml"), refused)


if __name__ == "__main__":
    sys.exit(main())
