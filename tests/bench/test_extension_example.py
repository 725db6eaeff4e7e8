"""The example of a kernel of one's own: compiled by PyTorch, equal to a sum, timed."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "extension_kernel.py"


@pytest.mark.matrix  # compiling PyTorch's headers takes half a minute
@pytest.mark.skipif(not (shutil.which("ninja") and shutil.which("c++")), reason="ninja or a C++ compiler is missing")
def test_a_kernel_in_cpp_is_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), "--size", "100000"])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    add, copy = capsys.readouterr().out.splitlines()
    assert add.startswith("add ")
    assert copy.startswith("copy ")
    assert all(line.endswith("GB/s") for line in (add, copy))
