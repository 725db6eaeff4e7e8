"""What a search leaves out by its bounds is nothing that it would have kept: against a search that prices every row."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from property.test_search import ADAPTED, CHOICES, DEEP, MIXED, SMALL, with_memory
from shardwise.hardware.cluster_loading import load_cluster
from shardwise.layout.choices import Choices
from shardwise.layout.layout import OFFLOADS
from shardwise.model.job import OVERLAP_CONVENTIONS, Job
from shardwise.model.load import load_model
from shardwise.pipeline.registry import NATURAL
from shardwise.price import Problem
from shardwise.search.vectorised import best_rows
from shardwise.search.vectorised import search_layouts as searching
from shardwise.search.vectorised.search_layouts import SearchChecks, SearchResult, search_layouts

MODELS = (SMALL, DEEP, MIXED, ADAPTED, load_model("llama-3.2-1b"), load_model("gpt-oss-20b"))
CLUSTERS = (
    ("h100:8", None), ("h100:24", "nemo-25"), ("h100:48", None), ("h100:16", "megatron-2022"), ("tpu-v5e:4x4", "maxtext"),
    ("tpu-v5e:2x4*2", None), ("h100:16", "shardwise"),
)  # fmt: skip
SCHEDULES = ((NATURAL,), (NATURAL, "zb_h1"), (NATURAL, "afab", "dualpipe"), ("zb_h2",))


def case(seed: int) -> tuple[SearchResult, SearchResult, int]:
    """A random search by bounds, the same without, and the number of rows that the first one timed."""
    rng = random.Random(seed)
    model = rng.choice(MODELS)
    name, stack = rng.choice(CLUSTERS)
    cluster = load_cluster(name, stack=stack)
    capacity = cluster.chip.memory_bytes * rng.choice((1.0, 0.3, 0.1, 0.03))
    cluster = with_memory(cluster, max(capacity, 2.2e9))
    seqs = rng.choice((16, 24, 60, 96))
    job = Job(global_batch_tokens=seqs * 1024, seq_len=1024, overlap=rng.choice((None, *OVERLAP_CONVENTIONS)))
    choices = dataclasses.replace(
        CHOICES, schedule=rng.choice(SCHEDULES), offload=rng.choice((("none",), OFFLOADS)),
        recompute_layers=rng.choice(((None,), (None, 0.5))), async_tp=rng.choice(((0,), (0, 1))),
        zero_stage=rng.choice((Choices().zero_stage, (1, 3), (0, 2))),
    )  # fmt: skip
    top, chunk = rng.choice((1, 7, 64)), rng.choice((700, 5000, searching.BLOCK_ROWS))
    timed: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(searching, "BLOCK_ROWS", chunk)
        add = best_rows.BestRows.add

        def counted(self: best_rows.BestRows, seconds: best_rows.Floats, *operands: object) -> None:
            timed.append(seconds.size)
            assert np.all(seconds > 0)
            add(self, seconds, *operands)  # type: ignore[arg-type]

        patch.setattr(best_rows.BestRows, "add", counted)
        bounded = search_layouts(Problem(model, cluster, job), choices=choices, top=top)
        num_timed = sum(timed)
        return (
            bounded,
            search_layouts(
                Problem(model, cluster, job), choices=choices, top=top, checks=SearchChecks(exhaustive=True)
            ),
            num_timed,
        )


@pytest.mark.thinned(12)
@pytest.mark.parametrize("seeds", [range(start, start + 2) for start in range(0, 24, 2)])
def test_bounds_leave_out_nothing_that_is_kept(seeds: range) -> None:
    num_rows = num_timed = 0
    for seed in seeds:
        bounded, every, timed = case(seed)
        for name in ("best", "pareto", "least_memory", "by_factorisation", "even"):
            assert getattr(bounded, name) == getattr(every, name), (seed, name)
        assert bounded.num_layouts == every.num_layouts
        assert bounded.num_fitting == every.num_fitting
        assert bounded.num_illegal_by_rule == every.num_illegal_by_rule
        num_rows, num_timed = num_rows + bounded.num_layouts, num_timed + timed
    assert 0 < num_timed < num_rows * 2 / 3
