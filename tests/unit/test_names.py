"""Messages about unknown names."""

from __future__ import annotations

from pathlib import Path

import pytest
from answers import answer

from shardwise.hardware.chips import chip_names, load_chip
from shardwise.hardware.stacks import get_stack
from shardwise.layout.choices import Choices
from shardwise.layout.layout import Layout
from shardwise.model.job import Job
from shardwise.model.load import find_model_name, hub_ids, load_model, model_names
from shardwise.present.command_line import build_parser, verb_parsers
from shardwise.present.verbs import OTHER_NAMES
from shardwise.values.dtypes import bytes_per_element
from shardwise.values.errors import MAX_NAME_LENGTH, InputError, describe_unknown, did_you_mean, find_nearest_names
from shardwise.values.precision import get_precision


@pytest.mark.parametrize("name", model_names())
def test_a_model_name_without_separators_is_suggested(name: str) -> None:
    assert find_nearest_names(name.replace("-", "").upper(), model_names()) == [name]


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3-8B", "llama-3-8b"),
        ("meta-llama/Llama-3.1-405B", "llama-3.1-405b"),
        ("meta-llama/Llama-2-70b-hf", "llama-2-70b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("qwen/qwen3-30b-a3b", "qwen3-30b-a3b"),
        (" deepseek-ai/DeepSeek-V3 ", "deepseek-v3"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
        ("openai-community/gpt2-xl", "gpt-2-xl"),
        ("google/gemma-3-27b-pt", "gemma-3-27b"),
        ("bigscience/bloom", "bloom-176b"),
        ("mistralai/Mixtral-8x22B-v0.1", "mixtral-8x22b"),
        ("mistral-community/Mixtral-8x22B-v0.1", "mixtral-8x22b"),
    ],
)
def test_a_hugging_face_id_is_a_model_of_the_catalogue(hub_id: str, name: str) -> None:
    assert find_model_name(hub_id) == name
    assert load_model(hub_id) == load_model(name)


@pytest.mark.parametrize("name", model_names())
def test_every_id_of_the_catalogue_is_read(name: str) -> None:
    for hub_id in hub_ids(name):
        assert name in (find_model_name(hub_id), "llama-3-405b")  # the paper's model is released only as Llama 3.1


def test_a_verb_accepts_an_id_like_a_name() -> None:
    for verb, flags in (("kv-cache", ("--context", "8Ki")), ("memory", ("h100:8", "--layout", "fsdp=8"))):
        answers = {answer(verb, model, *flags, "--json") for model in ("Qwen/Qwen3-8B", "QWEN/qwen3-8b", "qwen3-8b")}
        assert len(answers) == 1


@pytest.mark.parametrize(
    ("hub_id", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen/Qwen3-30B-A3B-Base", "qwen3-30b-a3b"),
        ("Qwen/Qwen3-30B-A3", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("openai/gpt-oss-20", "gpt-oss-20b"),
    ],
)
def test_an_unknown_id_states_what_to_download(hub_id: str, name: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(hub_id)
    assert str(caught.value) == (
        f"model: found '{hub_id}' (did you mean '{name}'?); the catalogue has no model of this Hugging Face id, and nothing is "
        f"fetched from a hub: download its config.json, such as https://huggingface.co/{hub_id}/resolve/main/config.json, and "
        "give the path of the file"
    )


def test_an_id_without_similar_names_has_no_suggestion() -> None:
    with pytest.raises(
        InputError, match=r"^model: found 'nobody/knows'; the catalogue has no model .*: download its config"
    ):
        load_model("nobody/knows")


def test_a_folder_takes_precedence_over_an_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clone of the repository in the current folder is read, as `transformers` does."""
    folder = tmp_path / "Qwen" / "Qwen3-8B"
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"config\.json"):
        load_model("Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("text", "candidates", "names"),
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
def test_misspelt_names_have_these_nearest_names(text: object, candidates: list[object], names: list[str]) -> None:
    assert find_nearest_names(text, candidates) == names


def test_a_text_that_is_not_a_name_has_no_nearest_name() -> None:
    assert find_nearest_names("tp" * MAX_NAME_LENGTH, ["tp"]) == []


def test_a_long_part_of_a_name_is_near_to_it() -> None:
    assert find_nearest_names("bubble", ["roofline", "pipeline-bubbles", "interleaved-bubbles"]) == [
        "pipeline-bubbles",
        "interleaved-bubbles",
    ]
    assert find_nearest_names("bub", ["roofline", "pipeline-bubbles"]) == []


def test_equally_near_names_are_listed_up_to_a_few() -> None:
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
def test_every_choice_by_name_suggests_the_nearest(make: object, hint: str) -> None:
    with pytest.raises(InputError) as caught:
        make()  # type: ignore[operator]
    assert f"(did you mean {hint}?)" in str(caught.value)


@pytest.mark.parametrize("verb", verb_parsers())
def test_every_flag_with_the_wrong_separator_is_suggested(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    for flag in (flag for action in verb_parsers()[verb]._actions for flag in action.option_strings if "-" in flag[2:]):
        wrong = "--" + flag[2:].replace("-", "_")
        with pytest.raises(SystemExit) as caught:
            build_parser().parse_args([verb, wrong, "4"])
        assert caught.value.code == 2
        assert f"unrecognized arguments: {wrong} (did you mean '{flag}'?)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
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
def test_unknown_verbs_and_choices_suggest_the_nearest(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_synonyms_of_verbs_suggest_a_verb() -> None:
    assert {suggestion.split()[0] for suggestion in OTHER_NAMES.values()} <= verb_parsers().keys()
    assert OTHER_NAMES.keys().isdisjoint(verb_parsers())


def test_values_and_words_after_a_double_dash_are_not_flags() -> None:
    """Values of flags and words behind `--` are as argparse has them; a unique beginning of a flag is that flag."""
    parser = build_parser()
    assert parser.parse_args(["show", "--", "models", "--wat"]).name == "--wat"
    assert parser.parse_args(["kv-cache", "gpt-2", "--cont=8", "--batch", "-4"]).batch == "-4"
    assert parser.parse_args(["show", "models", "-x y"]).name == "-x y"
