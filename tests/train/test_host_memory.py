"""Memory freed in a step stays with the process: the next step touches no new page."""

from __future__ import annotations

import subprocess
import sys

import pytest

from shardwise.run import machine_resources

# Pages that are touched for the first time while three arrays are made anew, after they were made and freed often; each is
# larger than what glibc would ever keep by itself (32 MiB).
SCRIPT = """
import resource
import torch
from shardwise.run.machine_resources import keep_host_memory
kept = keep_host_memory() if {keeps} else False
def step():
    return [torch.empty(10 * 2**20).fill_(1.0) for _ in range(3)]
for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
step()
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(*, keeps: bool) -> tuple[str, int]:
    ran = subprocess.run([sys.executable, "-c", SCRIPT.format(keeps=keeps)], capture_output=True, text=True, check=True)
    kept, count = ran.stdout.split()
    return kept, int(count)


def test_a_step_touches_no_fresh_page() -> None:
    kept, count = faults(keeps=True)
    if kept != "True":
        pytest.skip("this C library gives no say in what it keeps")
    assert count < 100
    assert faults(keeps=False)[1] > 1000


def test_a_c_library_without_mallopt_is_left_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_resources.ctypes, "CDLL", lambda _: object())
    assert not machine_resources.keep_host_memory()
