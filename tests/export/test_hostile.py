"""Files that are no launch, or that mean harm: each is refused in one line, soon, and none is run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwise.errors import InputError
from shardwise.export.launch import Machines
from shardwise.export.reading import read
from shardwise.export.targets import TARGETS

MACHINES = Machines(num_devices=16, devices_per_node=8)
LONG = 30.0  # seconds: far above what the longest takes
NAMES = ("launch.sh", "config.yaml", "config.yml", "ds_config.json", "config.toml", "recipe.py", "plan.json")


def texts(mark: Path) -> Iterator[str]:
    """What a file may hold; `mark` would be made by whoever ran it."""
    yield from ("\\" * 5000, "--num-layers", "a\n" * 10, "=", ":", "python a.py --", "torchrun", "srun bash")
    run = f"touch {mark}"
    yield from (
        "",
        " ",
        "\n" * 1000,
        "\x00",
        "\x00" * 1000,
        "\ufeff",
        "\u202e--tensor",
        "%" * 5000,
        "'",
        '"',
        "`",
        "$(",
        "${",
        "((",
    )
    yield from (
        f"$({run})",
        f"`{run}` --num-layers 3",
        f"{run}; python train.py --lr $({run})",
        f"eval {run}",
        f"X=$({run}) train --a 1",
    )
    yield from (
        f"!!python/object/apply:os.system ['{run}']",
        f"a: !!python/name:os.system\nb: {run}",
        "a: &a [*a]",
        "&a {a: *a}",
    )
    yield "a: &a [x,x,x,x,x,x,x,x,x]\n" + "\n".join(
        f"{c}: &{c} [*{p},*{p},*{p},*{p},*{p},*{p},*{p},*{p},*{p}]" for p, c in zip("abcdefgh", "bcdefghi", strict=True)
    )
    yield from (
        "[" * 100_000,
        "{" * 100_000,
        '{"a":' * 20_000,
        "a:\n" + "  b:\n" * 2,
        "- 1\n- 2",
        "- {",
        "a: b: c",
        "\t- a",
        "? [a]: b",
        "a: 1\na: 2",
    )
    yield from (
        "null",
        "true",
        "1e999",
        "NaN",
        '"text"',
        "[]",
        "{}",
        "[1, 2]",
        '{"a": NaN}',
        '{"train_batch_size": "all"}',
        '{"a": 1, "a": 2}',
    )
    yield from (
        "[a]\nb =",
        "a = 1\na = 2",
        "[[a]]\n[a]",
        "a = 1979-99-99",
        "[parallelism]\ntensor_parallel_degree = 'two'",
        "[parallelism]\ntensor_parallel_degree = -1",
    )
    yield from (
        f"__import__('os').system('{run}')",
        f"import os\nos.system('{run}')\ndef plan(): return 1",
        "def f(:",
        "lambda: 0",
        "x = " + "(" * 5000,
    )
    yield from (
        f"def config():\n    return eval('{run}')",
        f"import subprocess; subprocess.run(['touch', '{mark}'])",
        "class A: pass",
        "1/0",
    )
    yield from (
        "--" * 1000,
        "python a.py " + "--a " * 3_000,
        "python a.py --num-layers " + "9" * 400,
        "python a.py --num-layers -1 --hidden-size 0",
    )
    yield from (
        f"X={'$X' * 50}\nY=$X$X$X\npython a.py --lr $Y",
        "A=$B\nB=$A\npython a.py --lr $A",
        "\n".join(f"A{i}=$A{i + 1}$A{i + 1}" for i in range(60)),
    )
    yield from (
        "<html></html>",
        "<?xml version='1.0'?>",
        "PK\x03\x04",
        "#!/usr/bin/perl\nprint 1",
        "SELECT 1;",
        "ä" * 10_000,
        "\U0001f600" * 1000,
    )
    yield from (
        f"python -m x --{name} {value}"
        for name in ("tensor-model-parallel-size", "num-layers")
        for value in ("nan", "inf", "1e400", "0x10", "[]", "None")
    )
    yield from (
        "#" * 10_000,
        "a" * 90_000,
        ("a: " + "b" * 100 + "\n") * 5,
        "\n".join(f"k{i}: {i}" for i in range(2_000)),
    )
    yield from (
        "parallelism:\n  tp: -2\n",
        "parallelism:\n  tp: 1e9\n",
        "distributed_type: FSDP\nnum_processes: many\n",
        "compute_environment: 7\n",
    )
    yield from (
        '{"zero_optimization": {"stage": 9}}',
        '{"zero_optimization": []}',
        '{"train_micro_batch_size_per_gpu": -4}',
        '{"schema": "shardwise.plan/3"}',
    )


def test_none_is_run_and_each_is_refused_in_a_line(tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    every = list(texts(mark))
    assert len(every) >= 100
    began = time.process_time()
    for number, text in enumerate(every):
        with pytest.raises(InputError) as told:
            read({NAMES[number % len(NAMES)]: text}, MACHINES)
        assert all(0 < len(problem) < 2000 for problem in told.value.problems), text[:60]
    assert not mark.exists()
    assert time.process_time() - began < LONG * len(TARGETS)


@pytest.mark.parametrize("target", list(TARGETS))
def test_a_target_that_is_named_refuses_them_too(target: str, tmp_path: Path) -> None:
    mark = tmp_path / "was-run"
    for text in texts(mark):
        for name in NAMES:
            with pytest.raises(InputError):
                read({name: text}, MACHINES, target=target)
    assert not mark.exists()
