"""Files that are no launch, or that mean harm: each is refused in one line, soon, and none is run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

import pytest

from shardwise.interop.frameworks.targets import TARGETS
from shardwise.interop.launches.launch import Machines
from shardwise.interop.read_launch import parse_launch
from shardwise.values.errors import InputError

MACHINES = Machines(num_devices=16, devices_per_node=8)
LONG = 30.0  # seconds: far above what the longest takes
NAMES = ("launch.sh", "config.yaml", "config.yml", "ds_config.json", "config.toml", "recipe.py", "plan.json")


RUN = "RUN"  # stands for a command that leaves a mark
LETTERS = "abcdefgh"
TEXTS: Mapping[str, tuple[str, ...]] = {
    "nothing": ("", " ", "\n" * 1000, "\x00", "\x00" * 1000, "\ufeff", "a\n" * 10, "=", ":"),
    "characters": (
        "\\" * 5000, "%" * 5000, "#" * 10_000, "a" * 90_000, "ä" * 10_000, "\U0001f600" * 1000, "\u202e--tensor",
        ("a: " + "b" * 100 + "\n") * 5, "\n".join(f"k{i}: {i}" for i in range(2_000)),
    ),
    "quotes and brackets": ("'", '"', "`", "$(", "${", "((", "[" * 100_000, "{" * 100_000),
    "commands": (
        f"$({RUN})", f"`{RUN}` --num-layers 3", f"{RUN}; python train.py --lr $({RUN})", f"eval {RUN}",
        f"X=$({RUN}) train --a 1", "torchrun", "srun bash", "--num-layers", "--" * 1000, "python a.py --",
        "python a.py " + "--a " * 3_000, "python a.py --num-layers " + "9" * 400,
        "python a.py --num-layers -1 --hidden-size 0",
    ),
    "variables": (
        f"X={'$X' * 50}\nY=$X$X$X\npython a.py --lr $Y", "A=$B\nB=$A\npython a.py --lr $A",
        "\n".join(f"A{i}=$A{i + 1}$A{i + 1}" for i in range(60)),
    ),
    "values": tuple(
        f"python -m x --{name} {value}"
        for name in ("tensor-model-parallel-size", "num-layers")
        for value in ("nan", "inf", "1e400", "0x10", "[]", "None")
    ),
    "YAML": (
        f"!!python/object/apply:os.system ['{RUN}']", f"a: !!python/name:os.system\nb: {RUN}", "a: &a [*a]", "&a {a: *a}",
        "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
            f"{letter}: &{letter} [{','.join([f'*{before}'] * 9)}]" for before, letter in pairwise(LETTERS + "i")
        ),
        "a:\n" + "  b:\n" * 2, "- 1\n- 2", "- {", "a: b: c", "\t- a", "? [a]: b", "a: 1\na: 2",
        "parallelism:\n  tp: -2\n", "parallelism:\n  tp: 1e9\n", "distributed_type: FSDP\nnum_processes: many\n",
        "compute_environment: 7\n",
    ),
    "JSON": (
        "null", "true", "1e999", "NaN", '"text"', "[]", "{}", "[1, 2]", '{"a":' * 20_000, '{"a": NaN}', '{"a": 1, "a": 2}',
        '{"train_batch_size": "all"}', '{"zero_optimization": {"stage": 9}}', '{"zero_optimization": []}',
        '{"train_micro_batch_size_per_gpu": -4}', '{"schema": "shardwise.plan/3"}',
    ),
    "TOML": (
        "[a]\nb =", "a = 1\na = 2", "[[a]]\n[a]", "a = 1979-99-99", "[parallelism]\ntensor_parallel_degree = 'two'",
        "[parallelism]\ntensor_parallel_degree = -1",
    ),
    "Python": (
        f"__import__('os').system('{RUN}')", f"import os\nos.system('{RUN}')\ndef plan(): return 1",
        f"import subprocess; subprocess.run('{RUN}'.split())", f"def config():\n    return eval('{RUN}')", "def f(:",
        "lambda: 0", "x = " + "(" * 5000, "class A: pass", "1/0",
    ),
    "other languages": (
        "<html></html>", "<?xml version='1.0'?>", "PK\x03\x04", "#!/usr/bin/perl\nprint 1", "SELECT 1;",
    ),
}  # fmt: skip


def texts(mark: Path) -> list[str]:
    """Every text; whoever ran one would make `mark`."""
    return [text.replace(RUN, f"touch {mark}") for several in TEXTS.values() for text in several]


def test_hostile_texts_are_refused_in_one_line_and_never_run(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    every = texts(mark)
    began = time.process_time()
    for number, text in enumerate(every):
        with pytest.raises(InputError) as raised:
            parse_launch({NAMES[number % len(NAMES)]: text}, MACHINES)
        assert all(0 < len(problem) < 2000 for problem in raised.value.problems), text[:60]
    assert not mark.exists()
    assert time.process_time() - began < LONG * len(TARGETS)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("target", list(TARGETS))
def test_a_named_target_refuses_hostile_texts(target: str, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    for text in texts(mark):
        for name in NAMES:
            with pytest.raises(InputError):
                parse_launch({name: text}, MACHINES, target=target)
    assert not mark.exists()
