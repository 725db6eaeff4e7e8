"""Plans over several clusters with deadlines and budgets: the choice, its reason, and the message of a miss."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import shardwise as sw
from shardwise.hardware.cluster_loading import iterate_sizes
from shardwise.present.command_line import main
from shardwise.present.rendering.plain_text import render_text
from shardwise.present.reports.comparison import comparison_report
from shardwise.present.reports.wording import spare_lines
from shardwise.search.compare_clusters import (
    Comparison,
    Contender,
    choose_contender,
    describe_missed_limits,
    suggest_remedies,
)
from shardwise.search.verdicts import NoPlanReason

MODEL = sw.load_model("llama-3-8b")
JOB = sw.Job(global_batch_tokens=2**20, seq_len=8192, tokens=1e11)
WORDS = ["--batch-tokens", "1Mi", "--seq-len", "8192", "--tokens", "100B"]
DAY = 86400.0


def cluster(text: str, price: float | None) -> sw.Cluster:
    loaded = sw.load_cluster(text)
    return replace(loaded, chip=replace(loaded.chip, price_usd_per_hour=price, price_date=price and "2026-01-01"))


CLUSTERS = (cluster("h100:32", 2.0), cluster("h100:64", 2.0), cluster("tpu-v5p:4x4x4", 4.0))


@pytest.fixture(scope="module")
def planned() -> Comparison:
    return sw.plan_clusters(MODEL, CLUSTERS, JOB)


def days(comparison: Comparison, place: int) -> float:
    run = comparison.contenders[place].run
    assert run is not None
    return run.days


def usd(comparison: Comparison, place: int) -> float:
    run = comparison.contenders[place].run
    assert run is not None
    assert run.usd is not None
    return run.usd


def with_limits(comparison: Comparison, limits: sw.Limits, *, priceless: tuple[int, ...] = ()) -> Comparison:
    """The same plans against other limits."""
    contenders = []
    for place, contender in enumerate(comparison.contenders):
        plan = contender.plan
        assert plan is not None
        assert plan.run is not None
        if place in priceless:
            plan = replace(plan, run=replace(plan.run, usd=None))
        run = plan.run
        contenders.append(
            replace(contender, plan=plan, in_time=limits.in_time(run), within_budget=limits.within_budget(run))
        )
    return choose_contender(contenders, limits)


def test_without_limits_the_fastest_is_chosen(planned: Comparison) -> None:
    fastest = min(range(3), key=lambda place: days(planned, place))
    assert planned.chosen == fastest
    assert planned.reason.startswith("the fastest")
    assert planned.plan is planned.contenders[fastest].plan
    single = sw.plan(MODEL, CLUSTERS[0], JOB)
    assert planned.contenders[0].plan is not None
    assert planned.contenders[0].plan.estimate == single.estimate


def test_with_a_deadline_the_cheapest_in_time_is_chosen(planned: Comparison) -> None:
    loose = sw.Limits(deadline_s=1.01 * days(planned, 0) * DAY)
    judged = with_limits(planned, loose)
    assert all(contender.in_time for contender in judged.contenders)
    assert judged.chosen == min(range(3), key=lambda place: usd(planned, place))
    assert "the cheapest that meets the deadline" in judged.reason
    tight = with_limits(planned, sw.Limits(deadline_s=0.9 * days(planned, 0) * DAY))
    assert tight.contenders[0].in_time is False
    assert tight.chosen != 0


def test_with_a_budget_the_fastest_within_it_is_chosen(planned: Comparison) -> None:
    dearest = max(range(3), key=lambda place: usd(planned, place))
    judged = with_limits(planned, sw.Limits(budget_usd=0.999 * usd(planned, dearest)))
    assert judged.contenders[dearest].within_budget is False
    cheaper = [place for place in range(3) if place != dearest]
    assert judged.chosen == min(cheaper, key=lambda place: days(planned, place))
    assert "the fastest within the budget" in judged.reason


def test_without_prices_the_fewest_chip_hours_are_chosen(planned: Comparison) -> None:
    loose = sw.Limits(deadline_s=2 * days(planned, 0) * DAY)
    judged = with_limits(planned, loose, priceless=(2,))
    hours = [contender.run.chip_hours for contender in judged.contenders if contender.run]
    assert judged.chosen == hours.index(min(hours))
    assert "fewest chip-hours" in judged.reason
    assert "no sourced price_usd_per_hour for tpu-v5p" in judged.reason


def test_a_cluster_without_a_price_is_never_within_a_budget(planned: Comparison) -> None:
    judged = with_limits(planned, sw.Limits(budget_usd=1e12), priceless=(0, 1, 2))
    assert judged.chosen is None
    assert [contender.within_budget for contender in judged.contenders] == [None, None, None]


def test_a_lead_below_the_models_error_is_noted(planned: Comparison) -> None:
    twin = replace(planned.contenders[0], cluster="twin")
    judged = choose_contender([planned.contenders[0], twin], sw.Limits())
    assert "twin is within 0.0%, below the model's error" in judged.reason


def test_both_limits_must_be_met(planned: Comparison) -> None:
    fastest = min(range(3), key=lambda place: days(planned, place))
    limits = sw.Limits(deadline_s=1.0001 * days(planned, fastest) * DAY, budget_usd=0.99 * usd(planned, fastest))
    judged = with_limits(planned, limits)
    assert judged.chosen is None
    assert judged.reason == "no cluster meets the deadline and the budget"


def test_a_cluster_on_which_nothing_fits_stays_with_its_reason() -> None:
    big = sw.load_model("llama-3-70b")
    comparison = sw.plan_clusters(big, [sw.load_cluster("h100:8"), sw.load_cluster("h100:64")], JOB)
    assert comparison.contenders[0] == Contender(
        cluster="h100:8", chip="h100", num_devices=8, plan=None, problem=comparison.contenders[0].problem,
        in_time=None, within_budget=None, no_plan="nothing fits",
    )  # fmt: skip
    assert "no legal layout fits" in (comparison.contenders[0].problem or "")
    assert comparison.chosen == 1


FP8 = ["--precision", "fp8_deepseek_v3"]  # the A100 has no sourced peak of it


def test_a_cluster_without_a_sourced_rate_is_not_said_to_be_too_small(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "a100-80gb:64", "h100:64", *WORDS, *FP8)
    assert code == 0
    line = next(line for line in out.splitlines() if "a100-80gb:64" in line)
    assert "not known" in line
    assert "nothing fits" not in line
    code, out, err = run(capsys, "a100-80gb:64", "a100-80gb:32", *WORDS, *FP8)
    assert (code, out) == (2, "")
    assert "no sourced fp8" in err


def contender(no_plan: NoPlanReason) -> Contender:
    return Contender(
        cluster=no_plan, chip="h100", num_devices=8, plan=None, problem="why", in_time=None, within_budget=None,
        no_plan=no_plan,
    )  # fmt: skip


def test_that_no_layout_fits_is_said_only_where_all_were_priced(planned: Comparison) -> None:
    fits_not, unknown = contender("nothing fits"), contender("not known")
    assert choose_contender([fits_not], sw.Limits()).reason == "no layout fits on any of the clusters"
    reason = choose_contender([fits_not, unknown], sw.Limits()).reason
    assert reason == "no cluster has a plan (nothing fits: nothing fits, not known: not known)"
    unpriced = with_limits(planned, sw.Limits(budget_usd=1.0), priceless=(0,))
    assert unpriced.reason == "no cluster is known to meet the budget"


def test_smaller_sizes_that_were_planned_are_named() -> None:
    plan = sw.plan("llama-3-70b", cluster("h100:16", 2.0), sw.Job(global_batch_tokens=2**20, seq_len=8192, tokens=1e11))
    assert plan.run is not None
    assert plan.run.usd is not None
    fewer, _ = suggest_remedies(plan, sw.Limits(budget_usd=plan.run.usd / 2))
    assert fewer == "the model does not fit on h100:8, h100:4, h100:2, h100:1"


def test_days_and_dollars_carry_the_interval_of_the_step(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["h100:32", "h100:64", *WORDS, "--stack", "torchtitan"]
    _, out, _ = run(capsys, *arguments, "--json")
    _, report, _ = run(capsys, *arguments)
    for described in json.loads(out)["clusters"]:
        ratios = [end / described["step_time_s"] for end in described["interval90"]]
        for name in ("days", "chip_hours", "usd", "energy_mwh"):
            assert [end / described[name] for end in described[f"{name}_interval90"]] == pytest.approx(ratios, rel=0.01)
        low, high = described["days_interval90"]
        assert f"{described['days']:,.1f} ({low:,.1f} to {high:,.1f})" in report


def test_prices_of_different_years_are_named(planned: Comparison) -> None:
    older = planned.contenders[0].plan
    assert older is not None
    chip = replace(older.cluster.chip, price_date="2024-Q4")
    changed = replace(planned.contenders[0], plan=replace(older, cluster=replace(older.cluster, chip=chip)))
    mixed = replace(planned, contenders=(changed, *planned.contenders[2:]), chosen=0)
    text = render_text(comparison_report(mixed))
    assert "the prices are of different years (h100 2024-Q4, tpu-v5p 2026-01-01)" in text
    assert "different years" not in render_text(comparison_report(planned))


def test_a_deadline_inside_the_interval_is_noted() -> None:
    plan = sw.plan(MODEL, sw.load_cluster("h100:64", stack="megatron"), JOB)
    assert plan.run is not None
    assert plan.run.days_interval90 is not None
    between, above = (sum(plan.run.days_interval90) / 2, plan.run.days_interval90[1] * 1.01)
    assert plan.run.days < between
    (tight,) = spare_lines(sw.Limits(deadline_s=between * DAY), plan.run)
    assert "the upper end of its 90% interval" in tight
    (wide,) = spare_lines(sw.Limits(deadline_s=above * DAY), plan.run)
    assert "upper end" not in wide
    low = plan.run.days_interval90[0]
    (near,) = describe_missed_limits(sw.Limits(deadline_s=(low + plan.run.days) / 2 * DAY), plan.run)
    assert "; the lower end of its 90% interval" in near
    (far,) = describe_missed_limits(sw.Limits(deadline_s=low / 2 * DAY), plan.run)
    assert "lower end" not in far


def test_a_missed_limit_names_the_gap_and_the_size_that_meets_it() -> None:
    plan = sw.plan(MODEL, CLUSTERS[0], JOB)
    assert plan.run is not None
    limits = sw.Limits(deadline_s=plan.run.days / 1.2 * DAY)
    (miss,) = describe_missed_limits(limits, plan.run)
    assert f"{plan.run.days:.1f} days are" in miss
    assert "(20% too long; the lower end of its 90% interval" in miss
    more, mfu = suggest_remedies(plan, limits)
    name = more.partition(",")[0]
    bigger = sw.plan(MODEL, cluster(name, 2.0), JOB).run
    assert bigger is not None
    assert limits.in_time(bigger)
    assert f"{bigger.days:.1f} days" in more
    assert f"an MFU of {plan.estimate.mfu * 1.2:.1%}" in mfu


def test_a_budget_that_is_missed_says_how_many_tokens_it_pays() -> None:
    plan = sw.plan(MODEL, CLUSTERS[0], JOB)
    assert plan.run is not None
    assert plan.run.usd is not None
    limits = sw.Limits(budget_usd=plan.run.usd / 2)
    (miss,) = describe_missed_limits(limits, plan.run)
    assert "(100% too much)" in miss
    fewer, tokens = suggest_remedies(plan, limits)
    assert "h100:16, h100:8" in fewer
    assert "50B of the 100B tokens, or $1.00 a chip-hour in place of $2.00" in tokens


def test_a_cluster_of_ones_own_grows_by_an_assumption_that_is_said(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('chip = "h100"\n[[tiers]]\nname = "nvlink"\nsize = 8\nbytes_per_s = "450 GB/s"\n', encoding="utf-8")
    plan = sw.plan(MODEL, sw.load_cluster(str(file)), JOB)
    assert plan.run is not None
    more, _ = suggest_remedies(plan, sw.Limits(deadline_s=plan.run.days / 3 * DAY))
    assert more.startswith(("24 devices", "25 devices"))
    assert "not planned" in more


def test_sizes_are_whole_and_sorted() -> None:
    num_devices = [resized.num_devices for resized in iterate_sizes(sw.load_cluster("h100:16"), 1.5)]
    assert num_devices[:3] == [24, 32, 40]
    assert num_devices == sorted(num_devices)
    assert [resized.name for resized in iterate_sizes(sw.load_cluster("h100:16"), 0.5)] == [
        "h100:8",
        "h100:4",
        "h100:2",
        "h100:1",
    ]
    torus = [resized.num_devices for resized in iterate_sizes(sw.load_cluster("tpu-v5p:4x4x4"), 2.5)]
    assert torus[0] == 192
    assert torus == sorted(torus)
    assert max(torus) <= 8960


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["plan", "llama-3-8b", *arguments])
    shown = capsys.readouterr()
    return code, shown.out, shown.err


def test_report_is_a_table_of_clusters(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "h100:32", "h100:64", *WORDS, "--deadline", "30d", "--budget", "1M",
                         "--set", "chip.price_usd_per_hour=2")  # fmt: skip
    assert (code, err) == (0, "")
    for part in (
        "cluster",
        "chip-hours",
        "in time",
        "in budget",
        "* h100:",
        "chosen: h100:",
        "the cheapest",
        "layouts",
    ):
        assert part in out
    code, out, _ = run(capsys, "h100:32", "h100:64", *WORDS[:-2])
    assert code == 0
    assert "days" not in out
    assert "chosen: h100:64, the fastest" in out


def test_notes_of_the_estimates_are_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    bound = (*WORDS[:4], "--overlap", "per_axis")
    code, out, _ = run(capsys, "h100:8", "tpu-v5p:2x2x2", "tpu-v5p:2x2x4", *bound)
    assert code == 0
    note = "tpu-v5p has no measured matmul rate in the catalogue: compute is priced at the peak, a bound"
    assert out.count(note) == 1
    assert f"  note: tpu-v5p:2x2x2, tpu-v5p:2x2x4: {note}\n\nchosen" in out
    payload = json.loads(run(capsys, "h100:8", "tpu-v5p:2x2x2", *bound, "--json")[1])
    assert [note in described["notes"] for described in payload["clusters"]] == [False, True]


def test_payload_and_plan_file_of_a_comparison(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "plan.json"
    code, out, _ = run(capsys, "h100:32", "h100:64", *WORDS, "--deadline", "30d", "--json", "--out", str(target))
    payload: dict[str, Any] = json.loads(out)
    assert code == 0
    assert payload["schema"] == "shardwise.comparison/2"
    assert payload["deadline_days"] == 30
    assert [described["cluster"] for described in payload["clusters"]] == ["h100:32", "h100:64"]
    assert all(described["in_time"] for described in payload["clusters"])
    assert {
        "step_time_s",
        "mfu",
        "ideal_days",
        "days",
        "chip_hours",
        "usd",
        "energy_mwh",
        "layout",
        "missing",
    } <= payload["clusters"][0].keys()
    assert payload["plan"]["cluster"]["name"] == payload["chosen"]
    assert json.loads(target.read_text(encoding="utf-8")) == payload["plan"]


def test_one_cluster_keeps_its_payload_and_says_what_is_spare(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "h100:32", *WORDS, "--deadline", "30d", "--json")
    assert code == 0
    assert json.loads(out)["schema"] == "shardwise.plan/3"
    _, out, _ = run(capsys, "h100:32", *WORDS, "--deadline", "30d")
    assert "meets the deadline of 30.0 days with" in out


@pytest.mark.parametrize(
    ("arguments", "exit_code", "parts"),
    [
        (["h100:32", *WORDS, "--deadline", "1d"], 3, ["more than the deadline of 1.0", "what would do: h100:", "planned again"]),
        (["h100:32", "h100:64", *WORDS, "--deadline", "1d"], 3, ["no cluster meets", "NO", "what would do for h100:64"]),
        (["h100:32", *WORDS, "--budget", "1k", "--set", "chip.price_usd_per_hour=2"], 3, ["too much)", "of the 100B tokens"]),
        (["h100:32", *WORDS[:-2], "--deadline", "1d", "--budget", "2M"], 2, ["--deadline and --budget", "--tokens 15T"]),
        (["h100:32", *WORDS, "--deadline", "soon", "--budget", "lots"], 2, ["'soon'", "30d or 12h", "'lots'", "2M or 500k"]),
        (["h900:8", "h100:12", *WORDS], 2, ["'h900'", "nodes of 8"]),
        (["h100:8", "h100:16", *WORDS, "--pin", "pp=64"], 3, ["h100:8: no legal layout", "h100:16: no legal layout"]),
    ],
)  # fmt: skip
def test_missed_limits_exit_3_and_wrong_input_2(
    arguments: list[str], exit_code: int, parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (exit_code, "")
    assert err.startswith("error: ")
    for part in parts:
        assert part in err


def test_a_budget_without_a_price_names_the_value(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, same = tmp_path / "mine.toml", tmp_path / "same.toml"
    file.write_text(
        '[chip]\nname = "mine"\npeak_flops_per_s = { bf16 = "800 TFLOP/s" }\nmemory_bytes = "96 GB"\nmemory_bytes_per_s = '
        '"3 TB/s"\n[[tiers]]\nname = "nvlink"\nsize = 8\nbytes_per_s = "450 GB/s"\n',
        encoding="utf-8",
    )
    same.write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
    for clusters in ([str(file)], [str(file), str(same)]):
        code, _, err = run(capsys, *clusters, *WORDS, "--budget", "2M")
        assert code == 2
        assert "no sourced price_usd_per_hour of mine" in err
