"""Where no browser is installed, a run of the tests says so."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from web.chromium import WHY

ROOT = Path(__file__).parents[2]


def test_a_missing_browser_is_named_once_with_what_to_install(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(ROOT / "tests/web/test_web_reports.py")]
    completed = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    lines = [line for line in completed.stdout.splitlines() if WHY in line]
    assert [line.partition(": ")[0] for line in lines] == ["skipped"]
