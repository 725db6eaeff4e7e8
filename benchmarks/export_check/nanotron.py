"""Launches of nanotron, judged by its own configuration: get_config_from_file, with unknown names refused as it refuses them.

    python benchmarks/export_check/nanotron.py FOLDER...

Each FOLDER holds a launch that `shardwise export --to nanotron --out FOLDER` wrote. Prints a line for each; status 1 where one is
refused. Needs nanotron, PyTorch, dacite, PyYAML, packaging and tqdm; its logging, which it imports in a circle, is stubbed.
"""

from __future__ import annotations

import argparse
import sys
import types
from pathlib import Path
from typing import Any


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
        found = config.get_config_from_file(str(folder / "config.yaml"))
        kind = type(found.model.model_config).__name__
        if kind not in ("LlamaConfig", "Starcoder2Config"):
            return f"model_config became {kind}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:300]}"
    return None


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    sys.path.pop(0)  # this folder, whose files have the frameworks' names
    config = config_module()
    found = {folder: problem(config, folder) for folder in options.parse_args().folders}
    for folder, reason in found.items():
        print(f"{folder}: {'accepted' if reason is None else f'refused: {reason}'}")
    return int(any(found.values()))


if __name__ == "__main__":
    sys.exit(main())
