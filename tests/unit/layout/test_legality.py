"""Every rule has a layout that breaks only it, and its message states the found value and the fix."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import numpy as np
import pytest

from shardwise.hardware.stacks import get_stack, stack_names
from shardwise.layout.layout import CP_VARIANTS, Layout
from shardwise.layout.rules.layout_rule import RuleContext
from shardwise.layout.rules.table import layout_rules, require_legal, violations
from shardwise.layout.sharding_scheme import layout_degrees, num_micro_batches, seqs_per_replica
from shardwise.model.architecture import Architecture
from shardwise.model.job import Job
from shardwise.model.recurrent_mixers import RecurrentMixer
from shardwise.pipeline.registry import NATURAL, natural_schedule, schedule_names
from shardwise.values.errors import InputError

MODEL = Architecture(
    name="m", num_layers=12, d_model=768, d_ff=3 * 512, num_heads=12, num_kv_heads=4, head_dim=64, vocab_size=1000
)
JOB = Job(global_batch_tokens=16 * 768, seq_len=768)

# rule -> (devices, the layout that breaks only this rule, phrases of the message, the layout after the fix)
BROKEN: dict[str, tuple[int, Layout, tuple[str, ...], Layout]] = {
    "devices": (
        8,
        Layout(tp=2, fsdp=2, zero_stage=1),
        ("dp·fsdp·tp·cp·pp = 4", "8 devices", "fsdp = 4"),
        Layout(tp=2, fsdp=4, zero_stage=1),
    ),
    "heads_by_tp": (
        8,
        Layout(tp=8),
        ("tp = 8", "12 query heads (4 key-value heads)", "tp may be one of 1, 2, "),
        Layout(tp=4, dp=2),
    ),
    "d_ff_by_tp": (5, Layout(tp=5), ("tp = 5", "F = 1536"), Layout(dp=5)),
    "sequence_by_cp": (5, Layout(cp=5), ("2·cp = 10", "sequence of 768"), Layout(dp=5)),
    "cp_variant": (8, Layout(dp=8, cp_variant="zigzag"), ("cp_variant = zigzag", "cp, which is 1"), Layout(dp=8)),
    "heads_by_cp": (
        4,
        Layout(tp=2, cp=2, cp_variant="ulysses"),
        ("6 key-value heads", "tp·cp = 4", "cp_variant=zigzag"),
        Layout(tp=2, cp=2, cp_variant="zigzag"),
    ),
    "async_tp": (
        4,
        Layout(tp=4, async_tp=True),
        ("tp = 4 and sequence_parallel = false", "async_tp=false"),
        Layout(tp=4, async_tp=True, sequence_parallel=True),
    ),
    "sequence_by_tp": (
        4,
        Layout(tp=4, sequence_parallel=True),
        ("770 positions", "cp·tp = 4", "sequence_parallel=false"),
        Layout(tp=4),
    ),
    "stages": (
        16,
        Layout(pp=16, schedule="1f1b"),
        ("pp·num_virtual_stages = 16", "12 blocks", "at most one stage for each block"),
        Layout(pp=8, dp=2, schedule="1f1b"),
    ),
    "virtual_stages": (
        3,
        Layout(dp=3, num_virtual_stages=2),
        ("num_virtual_stages = 2 needs pp > 1", "num_virtual_stages=1"),
        Layout(dp=3),
    ),
    "micro_batch": (
        8,
        Layout(dp=8, micro_batch_seqs=3),
        ("micro_batch_seqs = 3", "2 sequences at most", "16 over dp·fsdp = 8", "set it to 2 or less"),
        Layout(dp=8, micro_batch_seqs=2),
    ),
    "zero_axes": (
        8,
        Layout(fsdp=8),
        ("zero_stage = 0", "fsdp·cp = 8", "zero_stage of 1 to 3 with fsdp > 1"),
        Layout(fsdp=8, zero_stage=2),
    ),
    "sequence_parallel_axis": (
        8,
        Layout(dp=8, sequence_parallel=True),
        ("sequence_parallel splits over tp, which is 1", "sequence_parallel=false"),
        Layout(dp=8),
    ),
    "experts": (8, Layout(dp=8, ep=2), ("ep = 2", "m has no experts", "leave both out"), Layout(dp=8)),
    "schedule": (
        8,
        Layout(pp=8, schedule="interleaved"),
        ("'interleaved' with pp = 8 and num_virtual_stages = 1", "'1f1b' is required, or num_virtual_stages=2"),
        Layout(pp=8, schedule="1f1b"),
    ),
    "schedule_batch": (
        8,
        Layout(pp=8, micro_batch_seqs=2, schedule="zb_h2"),
        ("zb_h2 requires at least 15 micro-batches", "there are 8 for pp = 8", "schedule=1f1b"),
        Layout(pp=8, schedule="zb_h2"),
    ),
    "carried_tensors_by_pp": (
        2,
        Layout(pp=2, schedule="1f1b"),
        ("pp = 2", "an embedding for each layer", "so pp=1 is required"),
        Layout(dp=2),
    ),
    "recurrence_by_tp": (
        8,
        Layout(tp=8),
        ("tp = 8", "12 channels of short_conv", "tp may be one of 1, 2, 3, 4, 6, 12"),
        Layout(tp=4, dp=2),
    ),
    "recurrence_by_cp": (
        2,
        Layout(cp=2),
        ("all_gather gives each of cp = 2 ranks two pieces", "cp_variant=ring or cp=1 is required"),
        Layout(cp=2, cp_variant="ring"),
    ),
    "windows_by_cp": (
        8,
        Layout(cp=8, cp_variant="ring"),
        ("768 / cp = 96 tokens", "windows of 64 tokens", "cp may be one of 1, 2, 3, 4, 6, 12"),
        Layout(cp=4, dp=2, cp_variant="ring"),
    ),
    "convolution_by_cp": (
        2,
        Layout(cp=2, cp_variant="ring"),
        ("768 / cp = 384 tokens", "499 rows before a token", "a smaller cp is required"),
        Layout(dp=2),
    ),
    "layers_per_stage": (
        4,
        Layout(pp=4, schedule="1f1b", layers_per_stage=(4, 4, 4)),
        ("3 stages are given for pp = 4",),
        Layout(pp=4, schedule="1f1b", layers_per_stage=(4, 1, 5, 2)),
    ),
}
CONVOLUTION = RecurrentMixer(kind="short_conv", num_heads=12, conv_width=3)
JOBS = {"sequence_by_tp": Job(global_batch_tokens=770 * 16, seq_len=770)}
MODELS = {
    "carried_tensors_by_pp": dataclasses.replace(MODEL, layer_input_dim=64),
    "d_ff_by_tp": dataclasses.replace(MODEL, num_heads=5, num_kv_heads=5),
    "heads_by_cp": dataclasses.replace(MODEL, num_kv_heads=6),
    "recurrence_by_tp": dataclasses.replace(MODEL, num_heads=8, num_kv_heads=8, recurrence=CONVOLUTION),
    "recurrence_by_cp": dataclasses.replace(MODEL, recurrence=CONVOLUTION),
    "windows_by_cp": dataclasses.replace(MODEL, shared_keys=True, q_lora_rank=64, output_rank=64, compress_window=64),
    "convolution_by_cp": dataclasses.replace(MODEL, recurrence=dataclasses.replace(CONVOLUTION, conv_width=500)),
}


def rule_violations(rule: str, layout: Layout, num_devices: int) -> list[str]:
    return violations(MODELS.get(rule, MODEL), JOBS.get(rule, JOB), num_devices, layout)


def test_every_rule_has_a_case() -> None:
    assert set(BROKEN) == {rule.name for rule in layout_rules()} | {"layers_per_stage"}


@pytest.mark.parametrize("rule", BROKEN)
def test_each_case_breaks_a_single_rule_with_an_explanation(rule: str) -> None:
    num_devices, layout, phrases, _ = BROKEN[rule]
    problems = rule_violations(rule, layout, num_devices)
    assert [problem.split(": ")[0] for problem in problems] == [rule]
    assert [phrase for phrase in phrases if phrase not in problems[0]] == []


@pytest.mark.parametrize("rule", BROKEN)
def test_the_fix_is_legal(rule: str) -> None:
    num_devices, _, _, fixed = BROKEN[rule]
    assert rule_violations(rule, fixed, num_devices) == []


def test_all_violations_are_reported_together() -> None:
    layout = Layout(dp=2, tp=5, micro_batch_seqs=100, zero_stage=1, ep=2)
    with pytest.raises(InputError) as caught:
        require_legal(MODEL, JOB, 8, layout)
    rules = [problem.split(": ")[1] for problem in caught.value.problems]
    assert rules == ["devices", "heads_by_tp", "d_ff_by_tp", "experts", "micro_batch", "zero_axes"]
    assert all(problem.startswith("layout: ") for problem in caught.value.problems)


@pytest.mark.parametrize("tp", [3, 5, 6, 8, 24])
def test_offered_tensor_parallel_degrees_are_legal(tp: int) -> None:
    """12 query heads in 4 groups: 6 divides the query heads but splits neither the groups nor each of them."""
    (problem,) = [p for p in violations(MODEL, JOB, tp, Layout(tp=tp)) if p.startswith("heads_by_tp")]
    offered = [int(number) for number in problem.split("tp may be one of ")[1].split(", ")]
    assert offered == [1, 2, 4, 12]


@pytest.mark.parametrize(("num_devices", "layout"), [(8, Layout(dp=3)), (8, Layout(dp=16)), (8, Layout(pp=5))])
def test_offered_fsdp_degrees_fill_the_cluster(num_devices: int, layout: Layout) -> None:
    problem = next(p for p in violations(MODEL, JOB, num_devices, layout) if p.startswith("devices"))
    for fsdp in re.findall(r"fsdp = (\d+) would fill it", problem):
        assert int(fsdp) * layout.dp * layout.tp * layout.cp * layout.pp == num_devices


@pytest.mark.parametrize("schedule", schedule_names())
@pytest.mark.parametrize(("pp", "virtual"), [(1, 1), (4, 1), (4, 2)])
def test_schedules_restrict_degrees(pp: int, virtual: int, schedule: Any) -> None:
    plain = ("afab", "1f1b", "zb_h1", "zb_h2", "dualpipe")
    in_turn = ("interleaved", "looped_bfs", "interleaved_breadth_first", "interleaved_zb", "zb_v", "dualpipe_v")
    legal = {(1, 1): ("none",), (4, 1): plain, (4, 2): in_turn}[pp, virtual]
    problems = violations(MODEL, JOB, pp, Layout(pp=pp, num_virtual_stages=virtual, schedule=schedule))
    assert (problems == []) == (schedule in legal)
    assert natural_schedule(pp, virtual) in legal


def test_rules_agree_on_numbers_and_arrays() -> None:
    axes = (
        "dp",
        "fsdp",
        "tp",
        "cp",
        "pp",
        "ep",
        "num_virtual_stages",
        "zero_stage",
        "micro_batch_seqs",
        "sequence_parallel",
        "async_tp",
        "etp",
    )
    values = ((1, 3), (1, 2), (1, 3, 5, 8), (1, 2, 5), (1, 13), (1, 2), (1, 2), (0, 2), (1, 4), (0, 1), (0, 1), (1, 3))
    rows = list(itertools.product(*values))
    columns = dict(zip(axes, np.array(rows, dtype=np.int64).T, strict=True))
    for rule in layout_rules():
        outcomes = set()
        for number, schedule in itertools.product(range(len(CP_VARIANTS)), (NATURAL, *schedule_names())):
            if rule.name not in ("schedule", "schedule_batch") and schedule != NATURAL:
                continue
            chosen = {"cp_variant": number, "schedule": schedule}
            degrees_of_rows = {**columns, **chosen}
            context = RuleContext(MODELS.get(rule.name, MODEL), JOB, 12, degrees_of_rows)
            vectorised = np.broadcast_to(rule.legal(context), len(rows))
            single = [bool(rule.legal(context.with_degrees(**dict(zip(axes, row, strict=True))))) for row in rows]
            assert vectorised.tolist() == single, rule.name
            outcomes |= set(single)
        assert outcomes == {True, False}, rule.name


def test_a_plain_ring_requires_a_piece_of_the_sequence_for_each_rank() -> None:
    job = Job(global_batch_tokens=16 * 765, seq_len=765)
    assert violations(MODEL, job, 5, Layout(cp=5, cp_variant="ring")) == []
    (problem,) = violations(MODEL, job, 4, Layout(cp=4, cp_variant="ring"))
    assert "1·cp = 4 does not divide the sequence of 765" in problem


def test_expert_parallelism_borrows_from_fsdp_and_splits_the_experts_evenly() -> None:
    model = dataclasses.replace(MODEL, num_experts=12, experts_per_token=2)
    offered = [
        ep for ep in (1, 2, 3, 4, 6, 8, 12) if not violations(model, JOB, 8, Layout(fsdp=8, zero_stage=3, ep=ep))
    ]
    assert offered == [1, 2, 4]
    (problem,) = violations(model, JOB, 8, Layout(fsdp=8, zero_stage=3, ep=8))
    assert problem.endswith("ep may be one of 1, 2, 4")


def test_the_shared_expert_is_split_by_tp_too() -> None:
    model = dataclasses.replace(MODEL, num_experts=4, experts_per_token=1, shared_expert_width=6)
    (problem,) = violations(model, JOB, 4, Layout(tp=4))
    assert "F = 1536 or 6; tp may be one of 1, 2" in problem


def test_whole_experts_take_tp_and_then_borrow_from_fsdp() -> None:
    model = dataclasses.replace(MODEL, num_experts=16, experts_per_token=2)
    violations_by_ep = {
        ep: violations(model, JOB, 16, Layout(fsdp=4, tp=4, zero_stage=3, ep=ep, etp=1)) for ep in (1, 2, 4, 8, 16)
    }
    assert [ep for ep, problems in violations_by_ep.items() if not problems] == [4, 8, 16]
    assert "experts are whole (etp = 1); ep may be one of 4, 8, 16" in violations_by_ep[2][0]
    (problem,) = violations(MODEL, JOB, 4, Layout(tp=4, etp=1))
    assert "m has no experts for ep = 1 or an etp to split; leave both out" in problem


def test_an_expert_is_split_over_tp_or_not_at_all() -> None:
    with pytest.raises(InputError, match="etp is 2; 1 for whole experts, or tp = 4, is required"):
        Layout(tp=4, etp=2)
    assert Layout(tp=4).expert_tp == Layout(tp=4, etp=4).expert_tp == 4


def test_an_uneven_batch_is_that_of_the_fullest_replica() -> None:
    """Sequences need not divide: 16 over 5 replicas are 4 at most, in micro-batches of 3 these are 2."""
    degrees = layout_degrees(Layout(dp=5, micro_batch_seqs=3))
    assert seqs_per_replica(JOB, degrees) == 4
    assert num_micro_batches(JOB, degrees) == 2


def test_sequence_parallelism_splits_the_pieces_of_context_parallelism() -> None:
    """12 positions are 2·cp = 4 pieces and 3 for each of tp = 4 ranks, but not one of cp·tp = 8 parts."""
    job = Job(global_batch_tokens=16 * 12, seq_len=12)
    split = Layout(tp=4, cp=2, zero_stage=1, sequence_parallel=True)
    (problem,) = violations(MODEL, job, 8, split)
    assert problem.startswith("sequence_by_tp: sequence parallelism splits 12 positions over cp·tp = 8")
    assert violations(MODEL, job, 8, dataclasses.replace(split, sequence_parallel=False)) == []
    assert violations(MODEL, job, 4, Layout(tp=4, sequence_parallel=True)) == []
    assert violations(MODEL, dataclasses.replace(job, global_batch_tokens=16 * 24, seq_len=24), 8, split) == []


@pytest.mark.parametrize(
    ("pp", "num_micro_batches", "legal"),
    [
        (2, 4, True),
        (2, 5, False),
        (2, 6, True),
        (2, 3, False),
        (4, 8, True),
        (4, 9, False),
        (4, 7, False),
        (3, 6, False),
    ],
)
def test_dualpipe_takes_equal_numbers_of_micro_batches_from_both_ends(
    pp: int, num_micro_batches: int, legal: bool
) -> None:
    """An even number of stages, each with its mirror image, and an even number of micro-batches, 2·pp at least.

    Source: DeepSeek-AI 2024, DualPipe's implementation, which asserts both.
    """
    job = Job(global_batch_tokens=num_micro_batches * 768, seq_len=768)
    problems = violations(MODEL, job, pp, Layout(pp=pp, schedule="dualpipe"))
    assert [problem.split(": ")[0] for problem in problems] == ([] if legal else ["schedule_batch"])
    if not legal:
        assert (
            f"micro-batches in multiples of 2 and an even pp; there are {num_micro_batches} for pp = {pp}"
            in problems[0]
        )


def test_interleaving_takes_micro_batches_in_multiples_of_the_stages() -> None:
    """Source: Narayanan et al. 2021, section 2.2."""
    layout = Layout(pp=3, num_virtual_stages=2, schedule="interleaved")
    (problem,) = violations(MODEL, JOB, 3, layout)
    assert problem == (
        "schedule_batch: interleaved requires micro-batches in multiples of 3; there are 16 for pp = 3; change micro_batch_seqs "
        "or pp, or set schedule=1f1b num_virtual_stages=1"
    )
    assert violations(MODEL, dataclasses.replace(JOB, global_batch_tokens=JOB.seq_len * 18), 3, layout) == []


class _RecordedDegrees(dict[str, Any]):
    """Degrees that record which of them were read."""

    def __init__(self, degrees: dict[str, Any]) -> None:
        super().__init__(degrees)
        self.names: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.names.add(name)
        return super().__getitem__(name)


@pytest.mark.parametrize("stack", [None, *stack_names()])
def test_rules_marked_as_reading_the_mode_are_those_that_do(stack: str | None) -> None:
    """A search evaluates these rules once per mode, and the other rules for all modes at once."""
    stack_values = None if stack is None else get_stack(stack)
    layout = Layout(tp=2, cp=2, fsdp=2, zero_stage=1, sequence_parallel=True, async_tp=True)
    rules = layout_rules(stack_values, equal_stages=True, divisible=True, domain=8)
    for rule in (rule for rule in rules if rule.source != "engine"):
        degrees = _RecordedDegrees(layout_degrees(layout))
        rule.legal(RuleContext(MODEL, JOB, 8, degrees))
        # whole experts are a choice of modes that a stack without them does not have
        reads_mode = bool(degrees.names & {"cp_variant", "async_tp", "etp"}) and rule.name != "stack_whole_experts"
        assert rule.reads_mode == reads_mode, rule.name
