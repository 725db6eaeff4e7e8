"""What an error says of a name that is not known."""

from __future__ import annotations

import pytest

from shardwise.hardware.chips import chip_names, load_chip
from shardwise.hardware.stacks import get_stack
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import load_model, model_names
from shardwise.present.command_line import build_parser, verb_parsers
from shardwise.present.verbs import OTHER_NAMES
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.errors import MAX_NAME_LENGTH, InputError, describe_unknown, did_you_mean, find_nearest_names
from shardwise.values.precision import get_precision


@pytest.mark.parametrize("name", model_names())
def test_a_model_without_its_separators_is_found_again(name: str) -> None:
    assert find_nearest_names(name.replace("-", "").upper(), model_names()) == [name]


@pytest.mark.parametrize(
    ("hub", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai-community/gpt2-xl", "gpt-2-xl"),
    ],
)
def test_a_name_of_a_hub_is_that_of_the_catalogue(hub: str, name: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(hub)
    assert str(caught.value).startswith(f"model: found '{hub}' (did you mean '{name}'?); the catalogue has ")
    assert "nothing is fetched from a hub" in str(caught.value)


@pytest.mark.parametrize(
    ("found", "known", "names"),
    [
        ("a100", chip_names(), ["a100-40gb", "a100-80gb"]),
        ("H100-SXM", chip_names(), ["h100"]),
        ("v5e", chip_names(), ["tpu-v5e"]),
        ("tpp", ["tp", "cp", "dp"], ["tp"]),
        ("colour", ["source", "norm", "mlp"], []),
        ("", ["tp"], []),
        (None, ["none"], []),
        (3, [1, 2, 3], []),
        ("a", [], []),
    ],
)
def test_the_nearest_names(found: object, known: list[object], names: list[str]) -> None:
    assert find_nearest_names(found, known) == names


def test_a_text_that_is_no_name_is_near_to_none() -> None:
    assert find_nearest_names("tp" * MAX_NAME_LENGTH, ["tp"]) == []


def test_a_long_part_of_a_name_is_near_to_it() -> None:
    assert find_nearest_names("bubble", ["roofline", "pipeline-bubbles", "interleaved-bubbles"]) == [
        "pipeline-bubbles",
        "interleaved-bubbles",
    ]
    assert find_nearest_names("bub", ["roofline", "pipeline-bubbles"]) == []


def test_equals_are_listed_and_a_few_of_them_only() -> None:
    assert did_you_mean("ab", ["ab1", "ab2", "ab3", "ab4"]) == " (did you mean 'ab1', 'ab2' or 'ab3'?)"
    assert describe_unknown("x", ["y"]) == "found 'x'; one of y is required"


SIZES = {"global_batch_tokens": 8, "seq_len": 8}


@pytest.mark.parametrize(
    ("make", "hint"),
    [
        (lambda: load_chip("h10"), "'h100'"),
        (lambda: get_stack("maxtex"), "'maxtext'"),
        (lambda: get_precision("mxpf8"), "'mxfp8'"),
        (lambda: bytes_per_element("bfloat16"), "'bf16'"),
        (lambda: Job(**SIZES, precision="fp8delayed"), "'fp8_delayed'"),
        (lambda: Job(**SIZES, overlap="peraxis"), "'per_axis'"),
        (lambda: Job(**SIZES, loss="chunkd"), "'chunked'"),
        (lambda: Layout(recompute="ful"), "'full'"),
        (lambda: Layout.parse("zero=3"), "'zero_stage'"),
        (lambda: Layout.parse("micro_batch=2"), "'micro_batch_seqs'"),
        (lambda: Choices().with_pins({"zero": 1}, {}), "'zero_stage'"),
        (lambda: Choices().with_pins({"schedule": "dual_pipe"}, {}), "'dualpipe'"),
        (lambda: Choices().with_pins({}, {"ppp": 4}), "'pp'"),
    ],
)
def test_every_choice_by_name_says_which_is_nearest(make: object, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        make()  # type: ignore[operator]
    assert f"(did you mean {hint}?)" in str(caught.value)


@pytest.mark.parametrize("verb", verb_parsers())
def test_every_flag_with_the_wrong_separator_is_found_again(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (flag for action in verb_parsers()[verb]._actions for flag in action.option_strings if "-" in flag[2:]):
        wrong = "--" + flag[2:].replace("-", "_")
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args([verb, wrong, "4"])
        assert caught.value.code == 2
        assert f"unrecognized arguments: {wrong} (did you mean '{flag}'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plann"], "argument VERB: found 'plann' (did you mean 'plan'?); one of plan, "),
        (
            ["sweep", "gpt-2"],
            "argument VERB: found 'sweep', which is no verb; use shardwise plan MODEL CLUSTER --sweep",
        ),
        (["show", "modls"], "argument kind: found 'modls' (did you mean 'models'?); one of models, "),
        (["--verson"], "unrecognized arguments: --verson (did you mean '--version'?)"),
        (["show", "chips", "--jsn=1", "--wat"], "unrecognized arguments: --jsn (did you mean '--json'?), --wat"),
    ],
)
def test_verbs_and_choices(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(words)
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_what_is_looked_for_under_other_names_is_done_by_verbs() -> None:
    assert {said.split()[0] for said in OTHER_NAMES.values()} <= verb_parsers().keys()
    assert OTHER_NAMES.keys().isdisjoint(verb_parsers())


def test_what_is_no_flag_is_not_taken_for_one() -> None:
    """Values of flags and words behind `--` are as argparse has them; a unique beginning of a flag is that flag."""
    parser = build_parser()
    assert parser.parse_args(["show", "--", "models", "--wat"]).name == "--wat"
    assert parser.parse_args(["kv-cache", "gpt-2", "--cont=8", "--batch", "-4"]).batch == "-4"
    assert parser.parse_args(["show", "models", "-x y"]).name == "-x y"
