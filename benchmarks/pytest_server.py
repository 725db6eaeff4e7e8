"""Runs tests in forks of a process that has the libraries loaded, and nothing of the package.

A line of the input is a request: `{"tests": [...], "limit_s": 600}`. A line of the output answers it: `{"status", "output"}`, the
exit status of pytest, or null where the tests took longer than they may.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

LIBRARIES = ("pytest", "numpy", "torch", "torch.distributed", "torch._dynamo", "safetensors.torch")
WAIT_S = 0.05


def run(tests: list[str], limit_s: float) -> dict[str, Any]:
    """The exit status of pytest on some tests, up to the first that fails, and what it said."""
    with tempfile.TemporaryDirectory() as folder:
        output_file = Path(folder, "said")
        child = os.fork()
        if child == 0:
            _test(tests, output_file, Path(folder, "temporary"))
        signal.signal(signal.SIGTERM, lambda *_: _end(child))
        status = _status(child, time.monotonic() + limit_s)
        _kill(child)  # what its tests have started and left
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return {
            "status": status,
            "output": output_file.read_text(encoding="utf-8", errors="replace") if output_file.exists() else "",
        }


def _test(tests: list[str], output_file: Path, temporary: Path) -> None:
    os.setsid()
    output = os.open(output_file, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    status = 99
    try:
        status = int(
            sys.modules["pytest"].main(["-q", "-x", "-p", "no:cacheprovider", "--basetemp", str(temporary), *tests])
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _kill(child: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)


def _end(child: int) -> None:
    _kill(child)
    os._exit(0)


def _status(child: int, end: float) -> int | None:
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(WAIT_S)
    return None


def main() -> None:
    """Answer requests until there are no more."""
    sys.path.pop(0)  # the folder of this file: others in it have the names of the tests' own
    for name in LIBRARIES:
        with suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(run(request["tests"], request["limit_s"])), flush=True)


if __name__ == "__main__":
    main()
