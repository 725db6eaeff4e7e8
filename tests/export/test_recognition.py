"""What a user is answered whose file is no launch, a broken one, or one of which only a part can be read."""

from __future__ import annotations

import pytest

from shardwise.hardware import load_cluster
from shardwise.interop.launches.launch import Machines
from shardwise.interop.read_launch import parse_launch, price_launch
from shardwise.model import load_model
from shardwise.values import InputError

EIGHT = Machines(num_devices=8, devices_per_node=8, chip="h100")


def test_a_file_of_no_framework_is_refused_with_the_nearest_alone() -> None:
    """Not with the reasons of sixteen readers: a broken file of nanotron is answered as nanotron's."""
    broken = (
        "parallelism:\n  dp: 2\n  tp: 2\n  pp: 1\n  pp_engine: 1f1b\n  tp_mode: ALL_REDUCE\n  expert_parallel_size: 1\n"
    )
    broken += "  tp_linear_async_communication: true\ntokens:\n  batch_accumulation_per_replica: 1\n"
    broken += "  micro_batch_size: 1\n  dp: 2\n  dp: 3\n"
    with pytest.raises(InputError) as refused:
        parse_launch({"config.yaml": broken}, EIGHT)
    assert len(refused.value.problems) == 2
    assert refused.value.problems[1].startswith("as a launch of nanotron: config.yaml is not YAML: line")
    with pytest.raises(InputError) as refused:
        parse_launch({"notes.txt": "nothing of a training"}, EIGHT)
    assert len(refused.value.problems) == 1


def test_an_experiment_of_primus_is_answered_as_one() -> None:
    """Adapters of Primus's own Megatron trainer were ignored, and all weights priced as trained."""
    experiment = "modules:\n  pre_trainer:\n    framework: {}\n    model: {}.yaml\n    overrides:\n      {}\n"
    with pytest.raises(
        InputError, match=r"an experiment of Primus for megatron_bridge; one for megatron, torchtitan, maxtext"
    ):
        parse_launch({"e.yaml": experiment.format("megatron_bridge", "qwen3_32b", "train_iters: 5")}, EIGHT)
    with pytest.raises(
        InputError, match=r"lora\.enabled: found true; adapters of Primus's Megatron trainer are not read"
    ):
        parse_launch({"e.yaml": experiment.format("megatron", "llama3_8B", "lora: {enabled: true}")}, EIGHT)


@pytest.mark.parametrize("name", ["gemma2-2b", "llama3-8b"])
def test_variables_of_a_maxtext_script_are_filled_in(name: str) -> None:
    """A model named by a variable was left out, and MaxText's default model priced in its place."""
    script = f"MODEL='{name}'\nexport LENGTH=4096\npython3 -m maxtext.trainers.pre_train.train base.yml model_name=${{MODEL}} "
    script += "max_target_length=$LENGTH per_device_batch_size=1 remat_policy=full run_name=$RUN EXTRA\n"
    model = {"gemma2-2b": "gemma-2-2b", "llama3-8b": "llama-3-8b"}[name]
    launch = parse_launch({"run.sh": script.replace("EXTRA", "")}, EIGHT, target="maxtext").launch
    assert (launch.model.num_layers, launch.job.seq_len) == (load_model(model).num_layers, 4096)
    with pytest.raises(InputError, match=r"ici_tensor_parallelism: found \$TP, which the script does not set; --env"):
        parse_launch({"run.sh": script.replace("EXTRA", "ici_tensor_parallelism=$TP")}, EIGHT, target="maxtext")


def test_a_note_on_a_launch_does_not_deny_what_its_framework_runs() -> None:
    """The stack of Accelerate plans bf16 with ZeRO alone; a trainer's launch that has it without is read all the same."""
    text = "base_model: NousResearch/Llama-3.2-1B\nmicro_batch_size: 2\ngradient_accumulation_steps: 2\nsequence_len: 2048\n"
    text += "bf16: true\nadapter: lora\nlora_r: 16\nlora_target_linear: true\noptimizer: adamw_torch\n"
    notes = price_launch({"config.yml": text}, load_cluster("h100:8")).plan.estimate.notes
    assert any(note.startswith("as the files say it, beyond the plans under accelerate: ") for note in notes)
