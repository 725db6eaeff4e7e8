"""The cells of the matrix: every axis alone, with every way of data parallelism, with every other axis, and some of several."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from training import ADAPTED, DENSE, MODELS, POSITIONS, PREDICTING, ROUTED, TIED, WINDOWED, Case

from shardwise.layout.layout import CP_VARIANTS, Layout
from shardwise.layout.rules.engine import ENGINE_RULES
from shardwise.layout.rules.layout_rule import RuleContext
from shardwise.layout.rules.table import violations
from shardwise.model.job import Job

MOST_DEVICES = {5: 16}  # by how many axes a cell has; 8 for fewer
# Four key-value heads, so that Ulysses has one for each of four ranks.
LATENT = replace(
    DENSE, name="latent", num_kv_heads=4, head_dim=6, kv_lora_rank=5, rope_head_dim=2, v_head_dim=3, q_lora_rank=3
)
# Their vocabularies no tp divides.
WINDOWS = replace(DENSE, name="windows", num_kv_heads=4, sliding_window=3, global_every=2, sinks=True, vocab_size=23)
DOCUMENTS = replace(DENSE, name="documents", num_kv_heads=4, qk_norm=True)
ROUTED_DOCUMENTS = replace(ROUTED, name="routed documents", num_kv_heads=4, vocab_size=25)
PACKED = (DOCUMENTS.name, ROUTED_DOCUMENTS.name)  # attention keeps to its document
STRUCTURES = {
    architecture.name: architecture
    for architecture in (
        DENSE, ROUTED, LATENT, WINDOWS, DOCUMENTS, TIED, ADAPTED, WINDOWED, ROUTED_DOCUMENTS, replace(PREDICTING, num_experts=4),
    )
}  # fmt: skip
DEEP = ", 5 layers"  # enough for four stages, or two of two virtual ones
MODELS.update(STRUCTURES)
MODELS.update(
    {
        f"{name}{DEEP}": replace(architecture, name=f"{name}{DEEP}", num_layers=5)
        for name, architecture in STRUCTURES.items()
    }
)

TP = {f"tp {n}{' sp' * sp}": {"tp": n, "sequence_parallel": sp} for n in (2, 4) for sp in (False, True)}
CP = {f"cp {n} {variant}": {"cp": n, "cp_variant": variant} for n in (2, 4) for variant in CP_VARIANTS}
EP = {
    "ep 2": {"ep": 2},
    "ep 4": {"ep": 4},
    "ep 2 whole, tp 2": {"ep": 2, "etp": 1, "tp": 2, "sequence_parallel": True},
    "ep 4 whole, tp 2": {"ep": 4, "etp": 1, "tp": 2, "sequence_parallel": True},
}
PP = {
    "pp 2 afab": {"pp": 2, "schedule": "afab"},
    "pp 2 1f1b": {"pp": 2, "schedule": "1f1b"},
    "pp 2 interleaved": {"pp": 2, "schedule": "interleaved", "num_virtual_stages": 2},
    "pp 2 looped bfs": {"pp": 2, "schedule": "looped_bfs", "num_virtual_stages": 2},
    "pp 2 zb-h1": {"pp": 2, "schedule": "zb_h1"},
    "pp 2 dualpipe": {"pp": 2, "schedule": "dualpipe"},
    "pp 2 interleaved breadth first": {"pp": 2, "schedule": "interleaved_breadth_first", "num_virtual_stages": 2},
    "pp 2 interleaved zb": {"pp": 2, "schedule": "interleaved_zb", "num_virtual_stages": 2},
    "pp 2 zb-v": {"pp": 2, "schedule": "zb_v", "num_virtual_stages": 2},
    "pp 2 dualpipe-v": {"pp": 2, "schedule": "dualpipe_v", "num_virtual_stages": 2},
    "pp 4 1f1b, uneven": {"pp": 4, "schedule": "1f1b", "layers_per_stage": (2, 1, 1, 1)},
    "pp 4 zb-h2": {"pp": 4, "schedule": "zb_h2"},
    "pp 4 dualpipe": {"pp": 4, "schedule": "dualpipe"},
}  # fmt: skip
AXES: Mapping[str, Mapping[str, Any]] = {**TP, **CP, **EP, **PP}
DATA: Mapping[str, Mapping[str, Any]] = {
    "dp": {"dp": 2},
    **{f"zero-{stage}": {"fsdp": 2, "zero_stage": stage} for stage in (1, 2, 3)},
    **{f"hybrid zero-{stage}": {"dp": 2, "fsdp": 2, "zero_stage": stage} for stage in (1, 2, 3)},
}
# The fsdp that ep is a part of.
BORROWED = {f"experts' zero-{stage}": {"zero_stage": stage} for stage in (1, 2, 3)}
TRIPLES = (
    ("tp 2 sp", "cp 2 zigzag", "dp"), ("tp 2", "cp 2 all_gather", "zero-3"), ("tp 2 sp", "cp 2 ulysses", "ep 2"),
    ("tp 2 sp", "ep 2", "zero-3"), ("cp 2 ring", "ep 2", "zero-2"), ("tp 2", "cp 2 ring", "zero-1"),
)  # fmt: skip
QUADRUPLES = (
    ("tp 2 sp", "cp 2 zigzag", "ep 2", "experts' zero-3"), ("tp 2 sp", "dp", "ep 2", "experts' zero-2"),
    ("pp 2 zb-h1", "tp 2 sp", "ep 2", "experts' zero-2"), ("pp 2 1f1b", "cp 2 zigzag", "ep 2", "experts' zero-3"),
    ("pp 2 dualpipe-v", "tp 2 sp", "ep 2", "experts' zero-3"),
)  # fmt: skip
QUINTUPLES = (("pp 2 interleaved", "tp 2 sp", "cp 2 zigzag", "ep 2", "experts' zero-1"),)
PIECES = {f"tp {n} pieces": {**TP[f"tp {n} sp"], "async_tp": True} for n in (2, 4)}
ALIKE = {  # without sequence parallelism all ranks of tp have the same tokens
    f"ep {n} whole, tp 2, no sp": {**EP[f"ep {n} whole, tp 2"], "sequence_parallel": False} for n in (2, 4)
}
WITH_TOKENS_ALIKE = (
    *((name,) for name in ALIKE), *itertools.product(["ep 2 whole, tp 2, no sp"], ["dp", "zero-1", "zero-3"]),
    ("ep 4 whole, tp 2, no sp", "zero-2"), ("ep 4 whole, tp 2, no sp", "cp 2 zigzag"),
    ("ep 2 whole, tp 2, no sp", "cp 2 ulysses"),
)  # fmt: skip
IN_PIECES = (
    *((name,) for name in PIECES), *itertools.product(["tp 2 pieces"], DATA), ("tp 4 pieces", "dp"), ("tp 4 pieces", "zero-3"),
    ("tp 2 pieces", "cp 2 all_gather"), ("tp 2 pieces", "cp 2 zigzag"), ("tp 2 pieces", "cp 4 ulysses"),
    ("tp 4 pieces", "cp 2 ring"), ("tp 2 pieces", "ep 2"), ("tp 2 pieces", "ep 2 whole, tp 2"), ("tp 4 pieces", "ep 2"),
    ("tp 2 pieces", "cp 2 zigzag", "zero-3"), ("tp 2 pieces", "cp 2 ring", "ep 2"),
)  # fmt: skip
RECOMPUTES = ("none", "selective", "full")


@dataclass(frozen=True)
class Cell:
    """A case by what it has of the axes."""

    parts: tuple[str, ...]
    case: Case

    @property
    def name(self) -> str:
        return f"{', '.join(self.parts)}: {self.case.model}"


def cells() -> list[Cell]:
    """Every combination that is legal for some structure, each with the one that its axes have met least."""
    num_cases: Counter[tuple[str, str]] = Counter()
    selected = []
    for parts in _combinations():
        recompute = RECOMPUTES[len(selected) % len(RECOMPUTES)]
        cases = [case for name in STRUCTURES if (case := _case(name, parts, recompute))]
        if not cases:
            assert len(parts) < 3, f"{parts}: no structure has such a layout"
            continue
        case = min(cases, key=lambda case_of_model: sum(num_cases[part, case_of_model.model] for part in parts))
        num_cases.update((part, case.model) for part in parts)
        selected.append(Cell(parts, case))
    return selected


def _combinations() -> Iterator[tuple[str, ...]]:
    yield from ((axis,) for axis in AXES)
    yield from itertools.product(AXES, DATA)
    for first, second in itertools.combinations((TP, CP, EP, PP), 2):
        yield from (
            pair
            for pair in itertools.product(first, second)
            if "tp" not in {**EP.get(pair[1], {})} or pair[0] not in TP
        )
    yield from TRIPLES
    yield from QUADRUPLES
    yield from QUINTUPLES
    yield from IN_PIECES
    yield from WITH_TOKENS_ALIKE


def _case(model: str, parts: tuple[str, ...], recompute: str) -> Case | None:
    """The case of a structure; None where it has no such layout, or the layout has too many devices."""
    staged = any(part in PP for part in parts)
    model += DEEP * staged
    architecture = MODELS[model]
    choices: dict[str, Any] = {}
    for part in parts:
        fields = {**AXES, **PIECES, **ALIKE, **DATA, **BORROWED}[part]
        if any(choices.get(name, value) != value for name, value in fields.items()):
            return None  # what one part has another has otherwise
        choices |= fields
    borrowed = choices.get("ep", 1) // (choices.get("tp", 1) if "etp" in choices else 1)
    choices["fsdp"] = choices.get("fsdp", 1) * max(borrowed, 1)
    if choices["fsdp"] * choices.get("cp", 1) > 1:
        choices.setdefault("zero_stage", int(choices["fsdp"] > 1))
    layout = Layout(**choices, recompute=recompute)
    case = Case(
        model, layout, num_seqs=2 * layout.pp * layout.num_replicas,
        recipe={"respect_documents": model.removesuffix(DEEP) in PACKED},
    )  # fmt: skip
    job = Job(global_batch_tokens=case.num_seqs * POSITIONS, seq_len=POSITIONS)
    context = RuleContext.from_layout(architecture, job, layout.num_devices, layout)
    runs = all(rule.legal(context) for rule in ENGINE_RULES)
    legal = layout.num_devices <= MOST_DEVICES.get(len(parts), 8) and not violations(
        architecture, job, layout.num_devices, layout
    )
    return case if legal and runs else None
