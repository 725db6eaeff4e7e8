"""Scripts of a shell: what a script sets and compares is understood, what comes from elsewhere stays, and nothing is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardwise.interop.launches.launch import Machines
from shardwise.interop.launches.launch_scripts import process_count_notes
from shardwise.interop.text_formats.shell_script import training_command
from shardwise.values.errors import InputError

RUN = "torchrun train.py --a 1"


def arguments(script: str) -> str:
    return " ".join(training_command(script, "script").arguments)


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("N=3\ntorchrun train.py --n $N", "--n 3"),
        ("N=3 # a comment's end\ntorchrun train.py --n ${N}", "--n 3"),
        ("N=${N:-3}\ntorchrun train.py --n $N", "--n 3"),
        ('N=${1:-"3"}\ntorchrun train.py --n $N', "--n 3"),
        ("N=$1\ntorchrun train.py --n $N", "--n $1"),
        ("G=8\nN=2\nW=$(($G*$N))\nP=$((W / 4 + 1))\ntorchrun train.py --w $W --p $P", "--w 16 --p 5"),
        ("W=$((2**99))\ntorchrun train.py --w $W", "--w $((2**99))"),
        ("A=(\n  --a 1 # one\n  --b '2 3'\n)\ntorchrun train.py ${A[@]} --c 4", "--a 1 --b 2 3 --c 4"),
        ("A=(--a 1)\nA+=(--b 2)\ntorchrun train.py ${A[@]}", "--a 1 --b 2"),
        ('A=(--a 1)\nA=("${A[@]}" --b 2)\ntorchrun train.py "${A[@]}"', "--a 1 --b 2"),
        ('A=("--a 1" "--b 2")\ntorchrun train.py ${A[@]}', "--a 1 --b 2"),
        ("A=(--x 'E|t')\ntorchrun train.py \"${A[@]}\"", "--x E|t"),
        ("O=' --a 1'\nO+=' --b 2'\ntorchrun train.py $O", "--a 1 --b 2"),
        ("N=1\ntorchrun train.py --n $N\nN=2", "--n 1"),
        ("torchrun train.py \\\n  --a 1 \\\n  --b 2 | tee log", "--a 1 --b 2"),
        ("python -m torch.distributed.run --nnodes 2 train.py --a 1 --b 2 --c 3", "--a 1 --b 2 --c 3"),
        ("torchrun --nnodes 2 -m package.train --a 1 --b 2", "--a 1 --b 2"),
        ("X=2 torchrun train.py --a 1", "--a 1"),
        ('CMD="\ncd /x;\npython train.py --a 1 --b 2"\nsrun --mpi pmix bash -c "${CMD}" 2>&1', "--a 1 --b 2"),
    ],
)
def test_words_are_split_as_the_shell_does(script: str, expected: str) -> None:
    assert arguments(script) == expected


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ('[ "$KIND" = fp8 ]', True),
        ('[[ "$KIND" == "fp8" ]]', True),
        ('[ "$KIND" != fp8 ]', False),
        ("[ ${KIND} == bf16 ]", False),
        ("[ $N -gt 1 ]", True),
        ("[ $N -lt 1 ]", False),
        ('[ -n "${UNSET}" ]', False),
        ('[ -z "${UNSET}" ]', True),
        ('[ -n "$KIND" ]', True),
        ('[[ "$KIND" == "x" ]] || [[ $N -eq 4 ]]', True),
        ('[[ "$KIND" == "fp8" ]] && [[ $N -eq 3 ]]', False),
        ('[ ! -f "$KIND" ]', False),
        ("[ -d /tmp ]", False),
        ("grep -q x file", False),
    ],
)
def test_conditions_on_texts_and_numbers_are_known(condition: str, holds: bool) -> None:
    script = f"KIND=fp8\nN=4\nA=1\nif {condition}; then\n  A=2\nelse\n  A=3\nfi\ntorchrun train.py --a $A"
    assert arguments(script) == f"--a {2 if holds else 3}"


def test_the_first_true_branch_is_taken() -> None:
    script = (
        "S={}\nif [ $S == a ]; then\nN=1\nelif [ $S == b ]; then\nN=2\nelif [ $S != c ]; then\nN=3\nelse\nN=4\nfi\n"
    )
    taken = [arguments(script.format(size) + "torchrun train.py --n $N") for size in "abcd"]
    assert taken == ["--n 1", "--n 2", "--n 4", "--n 3"]


def test_conditions_within_conditions_and_loops_are_left_out() -> None:
    nested = "if [ a = b ]; then\nif [ a = a ]; then\nN=1\nfi\nelse\nif [ a = a ]; then\nN=2\nfi\nfi\n"
    assert arguments(nested + "torchrun train.py --n $N") == "--n 2"
    loop = "N=1\nwhile [[ $# -gt 0 ]]; do\ncase $1 in\n--n)\nN=2\n;;\nesac\ndone\n"
    assert arguments(loop + "torchrun train.py --n $N") == "--n 1"


@pytest.mark.parametrize(
    ("script", "started"),
    [
        (f"torchrun --nnodes 4 --nproc-per-node 8 {RUN.removeprefix('torchrun ')}", "4 × 8 = 32"),
        ("torchrun --standalone --nproc_per_node=4 train.py --a 1", "1 × 4 = 4"),
        ("N=2\nsrun python -m torch.distributed.run --nnodes=$N --nproc_per_node=${G:-8} train.py", "2 × 8 = 16"),
        ("deepspeed --num_nodes 2 --num_gpus 8 train.py --a 1", "2 × 8 = 16"),
        ("deepspeed --num_gpus 8 train.py --a 1", None),  # on each node of the hostfile
        ("torchrun --nnodes $N --nproc-per-node 8 train.py", None),
        ("torchrun --nnodes 1:4 --nproc-per-node 8 train.py", None),
        ("torchrun --nnodes 2 --nproc-per-node gpu train.py", None),
        ("torchrun --nnodes 1 --nproc-per-node 2 train.py", None),  # as many as there are
        ("python train.py --nnodes 4 --nproc-per-node 8", None),  # the program's own
        ("", None),
    ],
)
def test_a_launch_of_more_processes_than_devices_is_noted(script: str, started: str | None) -> None:
    notes = list(process_count_notes({"run.sh": script}, Machines(num_devices=2, devices_per_node=2)))
    assert notes == ([f"run.sh starts {started} processes; this is priced on 2 devices"] if started else [])


def test_reading_a_script_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "made"
    program = f"__import__('os').system('touch {path}')"
    script = f"A=$(touch {path})\nB=`touch {path}`\nC=$(({program}))\ntouch {path}\n{RUN} --b $A $B $C"
    training_command(script, "script")
    assert not path.exists()


@pytest.mark.parametrize("script", ["", "# nothing", "echo", "x" * 1_000_001, "A=" + "y " * 30_000 + "\n" + RUN])
def test_texts_without_a_launch_are_refused(script: str) -> None:
    with pytest.raises(InputError):
        training_command(script, "script")
