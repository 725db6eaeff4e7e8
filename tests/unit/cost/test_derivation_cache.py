"""Values read from derivations are cached on disk for the next process; results do not depend on the cache."""

from __future__ import annotations

import dataclasses
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from schemes import scheme_of

from shardwise.layout.sharding_scheme import ShardingScheme
from shardwise.model.load import load_model
from shardwise.price import derivation_cache, unit_inputs
from shardwise.price.derivation_cache import use_derivation_cache
from shardwise.price.unit_inputs import (
    UnitCostInputs,
    derive_cost_inputs,
    derive_live_sets,
    unit_cost_inputs,
    unit_live_sets,
)
from shardwise.values.engine_policies import IssuePolicy
from shardwise.values.units import SECONDS_PER_DAY

STRUCTURE = load_model("deepseek-v2-lite").structure
POLICY, SCHEME = IssuePolicy(), scheme_of(STRUCTURE, 3, True, "full", whole_experts=True)
UNITS = ("block", "dense_block", "head")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of cached files in a test; nothing is cached from other tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    _forget()
    yield tmp_path / "shardwise"
    _forget()


def _forget() -> None:
    unit_inputs._cached_cost_inputs.cache_clear()
    unit_inputs._cached_live_sets.cache_clear()


def read_units() -> dict[str, UnitCostInputs]:
    """Parts of some units, as a new process would get them."""
    _forget()
    with use_derivation_cache():
        unit_live_sets(SCHEME, "block", POLICY)
        return {unit: unit_cost_inputs(SCHEME, unit, POLICY) for unit in UNITS}


def count_derived(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The units that are derived from here on, in order."""
    derived: list[str] = []

    def counting(scheme: ShardingScheme, name: str, policy: IssuePolicy) -> UnitCostInputs:
        derived.append(name)
        return derive_cost_inputs(scheme, name, policy)

    monkeypatch.setattr(unit_inputs, "derive_cost_inputs", counting)
    return derived


def test_the_next_process_reads_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    derived = count_derived(monkeypatch)
    first = read_units()
    assert derived == list(UNITS)
    (path,) = folder.iterdir()
    assert path.stat().st_mode & 0o077 == 0
    second = read_units()
    assert derived == list(UNITS)
    assert first == second
    for unit in UNITS:
        scheme = unit_inputs.priced_scheme(SCHEME, unit)
        assert second[unit] == derive_cost_inputs(scheme, unit, POLICY)
    with use_derivation_cache():
        assert unit_live_sets(SCHEME, "block", POLICY) == derive_live_sets(SCHEME, "block", POLICY)


def test_new_units_are_added_to_the_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_units()
    derived = count_derived(monkeypatch)
    _forget()
    with use_derivation_cache():
        unit_cost_inputs(dataclasses.replace(SCHEME, zero_stage=1), "block", POLICY)
    assert derived == ["block"]
    _forget()
    with use_derivation_cache():
        unit_cost_inputs(dataclasses.replace(SCHEME, zero_stage=1), "block", POLICY)
        unit_cost_inputs(SCHEME, "block", POLICY)
    assert derived == ["block"]


@pytest.mark.parametrize("harm", ["cut", "other", "writable"])
def test_a_file_that_cannot_be_trusted_is_derived_again(
    harm: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = read_units()
    (path,) = folder.iterdir()
    content = path.read_bytes()
    if harm == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif harm == "other":
        path.write_bytes(b"something else")
    else:
        path.chmod(0o666)
    derived = count_derived(monkeypatch)
    assert read_units() == first
    assert derived == list(UNITS)
    assert path.stat().st_mode & 0o077 == 0
    assert read_units() == first
    assert derived == list(UNITS)


def test_a_file_with_a_flipped_bit_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coefficient with a flipped bit would be read without an error and give a wrong price."""
    first = read_units()
    (path,) = folder.iterdir()
    content = path.read_bytes()
    derived = count_derived(monkeypatch)
    for bit in random.Random(0).sample(range(8 * len(content)), 40):
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert derivation_cache._read(path) == {}, bit
    assert read_units() == first
    assert derived == list(UNITS)
    assert derivation_cache._read(path)


def test_a_file_under_the_name_of_another_is_not_read(folder: Path) -> None:
    read_units()
    (path,) = folder.iterdir()
    renamed = path.with_name(f"{'0' * 32}.pickle")
    path.rename(renamed)
    assert derivation_cache._read(renamed) == {}


def test_a_home_that_cannot_be_written_changes_nothing(folder: Path) -> None:
    first = read_units()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("a file in place of the folder")
    assert read_units() == first


@pytest.mark.parametrize(("days", "stays"), [(0.0, True), (29.9, True), (30.1, False), (400.0, False)])
def test_files_of_other_sources_are_removed_after_thirty_days(
    days: float, stays: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_units()
    (old,) = folder.iterdir()
    now = time.time()
    os.utime(old, (now, now - days * SECONDS_PER_DAY))
    monkeypatch.setattr(derivation_cache, "_sources", lambda: [("another", 1, 1)])
    read_units()
    assert old.exists() == stays
    assert len(list(folder.iterdir())) == 1 + stays


def test_nothing_is_written_unless_the_cache_is_enabled(folder: Path) -> None:
    unit_cost_inputs(SCHEME, "block", POLICY)
    assert not folder.exists()
