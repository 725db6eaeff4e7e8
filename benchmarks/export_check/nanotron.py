"""Launches of nanotron, judged by its own configuration: get_config_from_file, with unknown names refused as it refuses them.

    python benchmarks/export_check/nanotron.py FOLDER...

Each FOLDER holds launches that `shardwise export --to nanotron --out FOLDER` wrote. Prints a line for each that is refused;
status 1 where one is. Needs nanotron, PyTorch, dacite, PyYAML, packaging and tqdm; its logging, which it imports in a circle, is
stubbed.
"""

from __future__ import annotations

import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

from launch_verdicts import find_launches, launch_arguments, print_refusals


def logging_levels() -> dict[str, int]:
    """Levels of the standard library, which nanotron's logging passes on."""
    import logging

    return logging.getLevelNamesMapping()


def _nothing(name: str) -> Any:
    """Any function of the module, which does nothing."""
    if name.startswith("__"):
        raise AttributeError(name)
    return lambda *args, **kwargs: None


def config_module() -> Any:
    """nanotron.config.config without its logging."""
    logging = types.ModuleType("nanotron.logging")
    vars(logging).update(logging_levels())
    logging.__getattr__ = _nothing  # type: ignore[method-assign]
    sys.modules["nanotron.logging"] = logging
    import nanotron

    nanotron.logging = logging
    import nanotron.config.config as config

    return config


def problem(config: Any, folder: Path) -> str | None:
    """Why nanotron refuses a launch; None where it takes it."""
    try:
        parsed = config.get_config_from_file(str(folder / "config.yaml"))
        kind = type(parsed.model.model_config).__name__
        if kind not in ("LlamaConfig", "Starcoder2Config"):
            return f"model_config became {kind}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    return None


def main() -> int:
    launches = find_launches(launch_arguments(__doc__).parse_args().folders, "config.yaml")
    sys.path.pop(0)  # this folder, whose files have the frameworks' names
    return print_refusals(launches, partial(problem, config_module()))


if __name__ == "__main__":
    sys.exit(main())
