"""`tokenize`: text as token shards; `verify`, `rehearse`: checks of a plan without its devices; `train`: run a plan."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypedDict, Unpack

from shardwise import measure, run
from shardwise import verify as verify_room
from shardwise.present.arguments import PLAN_HELP, PlanOrFile, read_plan
from shardwise.present.verb import Argument, verb
from shardwise.records.run_summary import RunSummary
from shardwise.run.trainer.flags import (
    DESCRIPTION,
    EXAMPLES,
    FLAGS,
    OPTIMIZER_FIELDS_TITLE,
    make_arguments,
    optimizer_fields_text,
)
from shardwise.run.trainer.flags import GROUPS as FLAG_GROUPS
from shardwise.values import Progress, ignore_progress

if TYPE_CHECKING:
    from shardwise.measure import Rehearsal
    from shardwise.run import TokenizedCorpus
    from shardwise.verify import PlanVerification

EXIT_NOT_AS_PLANNED = 3  # the exit code of a check that fails


@verb(
    description="""Write the tokens of text files as shards that a trainer maps into memory, with the tokenizer beside them.

A file is a document; of a .jsonl file every line is one, an object with a "text". A folder is walked in the order of its paths,
hidden files left out. Without --tokenizer a byte-level BPE is trained on the text itself.""",
    examples=(
        "shardwise tokenize books/ --out data",
        "shardwise tokenize notes.md corpus.jsonl --tokenizer tokenizer.json --out data",
        "shardwise tokenize --python-library 4MB --vocab-size 4096 --held-out 0.05 --out data",
    ),
    group_order=("text", "tokenizer", "output"),
    requires=("tokenizers",),
)
def tokenize(
    sources: Annotated[
        Sequence[str | os.PathLike[str]],
        Argument(group="text", metavar="DIR_OR_FILE", variadic=True, optional=True, help="folders and files of text"),
    ] = (),
    *,
    out: Annotated[
        str | os.PathLike[str],
        Argument(
            flag="--out", group="output", required=True, metavar="DIR", help="the folder to write; it must not exist",
        ),
    ],
    globs: Annotated[
        Sequence[str],
        Argument(
            flag="--glob", group="text", repeat=True, metavar="PATTERN",
            help="files of folders to take, such as '*.txt'; may be repeated (default: txt, md, rst, py and jsonl)",
        ),
    ] = (),
    python_library: Annotated[
        int | str | None,
        Argument(
            flag="--python-library", group="text", metavar="SIZE",
            help="take so much of the source of Python's standard library too, such as 4MB: text that is always there",
        ),
    ] = None,
    tokenizer: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--tokenizer", group="tokenizer", metavar="FILE", help="a tokenizer.json to use (default: train one)",
        ),
    ] = None,
    vocab_size: Annotated[
        int | str | None,
        Argument(
            flag="--vocab-size", group="tokenizer", metavar="N",
            help="tokens of the tokenizer that is trained (default: 8Ki)",
        ),
    ] = None,
    end_of_document: Annotated[
        str | None,
        Argument(
            flag="--end-of-document", group="tokenizer", metavar="TOKEN",
            help="of --tokenizer, the token that ends a document (default: the one that is known of published models)",
        ),
    ] = None,
    held_out: Annotated[
        float | str,
        Argument(
            flag="--held-out", group="output", metavar="FRACTION",
            help="part of the documents kept for validation (default: 0.01)",
        ),
    ] = "0.01",
    force: Annotated[
        bool, Argument(flag="--force", group="output", help="replace the token shards that are there")
    ] = False,
    progress: Progress = ignore_progress,
) -> TokenizedCorpus:  # fmt: skip
    """Write the documents of files and folders as token shards into the folder `out`, with their tokenizer.

    Without `tokenizer` a byte-level BPE of at most `vocab_size` tokens is trained on the text. The fraction `held_out` of the
    documents goes to shards of its own. Raises `InputError` with everything that is wrong; nothing is written then.

    >>> tokenize(out="data")
    Traceback (most recent call last):
    ...
    shardwise.values.errors.InputError: tokenize: found no text; a folder, a file or python_library SIZE is required
    """
    text = run.TextSelection(sources=sources, globs=globs, python_library=python_library)
    choice = run.TokenizerChoice(file=tokenizer, vocab_size=vocab_size, end_of_document=end_of_document)
    return run.tokenize_text(text, choice, out, held_out=held_out, force=force, progress=progress)


@verb(
    description="""Check that the layout of a plan trains right. A small model with the plan's structure is trained for some steps
on meshes of at most 8 ranks that have all axes and variants of the plan's layout, in float64 and in the plan's precision on this
machine's CPU, and on one rank: loss, norm, every gradient and every weight are compared, and the collectives with the instruction
list.""",
    remark="Exit codes: 0 it trains right, 2 the input is wrong, 3 it does not train right.",
    examples=(
        "shardwise plan llama-3-70b h100:1024 --batch-tokens 4Mi --seq-len 8Ki --runnable --out plan.json",
        "shardwise verify plan.json",
        "shardwise verify plan.json --set recipe.balance=bias --set recipe.reduction=after --json",
    ),
    group_order=("plan", "training", "output"),
    requires=("torch",),
    exit_code=lambda verification: 0 if verification.ok else EXIT_NOT_AS_PLANNED,
)
def verify(
    plan: PlanOrFile,
    steps: Annotated[
        int | str, Argument(flag="--steps", group="training", metavar="N", help="optimizer steps (default: 3)")
    ] = 3,
    seed: Annotated[
        int | str,
        Argument(flag="--seed", group="training", metavar="N", help="of weights and tokens (default: 0)"),
    ] = 0,
    overrides: Annotated[
        Sequence[str],
        Argument(
            flag="--set", group="training", repeat=True, metavar="KEY=VALUE",
            help="a value of the recipe, such as recipe.balance=bias or recipe.respect_documents=true; may be repeated",
        ),
    ] = (),
    progress: Progress = ignore_progress,
) -> PlanVerification:  # fmt: skip
    """Train a small model with a plan's structure on small meshes and on one rank, and compare every gradient and weight.

    `plan` is a plan or the path of its file. Raises `InputError` for a layout that does not run, and if a rank fails.
    """
    loaded = read_plan(plan)
    return verify_room.verify_plan(loaded, verify_room.small_recipe(loaded, steps, seed, overrides), progress)


@verb(
    description="""Run a step of one rank of a plan's world, of any size, in this process: the engine of `train` on tensors
without data, over process groups whose other ranks are absent. The collectives that it issues are compared with the plan's list,
and its memory with the plan's, term by term. Exit code 3 where either is not as planned.""",
    examples=(
        "shardwise plan llama-3-8b h100:1024 --batch-tokens 16Mi --seq-len 8192 --runnable --out plan.json",
        "shardwise rehearse plan.json --rank 1023 --json",
    ),
    group_order=("plan", "training", "output"),
    requires=("torch",),
    exit_code=lambda rehearsal: 0 if rehearsal.ok else EXIT_NOT_AS_PLANNED,
)
def rehearse(
    plan: PlanOrFile,
    rank: Annotated[
        int,
        Argument(flag="--rank", group="plan", parse=int, metavar="N", help="which of the plan's ranks (default: 0)"),
    ] = 0,
    overrides: Annotated[
        Sequence[str],
        Argument(
            flag="--set", group="training", repeat=True, metavar="KEY=VALUE",
            help="replace a value of the recipe, such as recipe.reduction=after; may be repeated",
        ),
    ] = (),
) -> Rehearsal:  # fmt: skip
    """Run a step of one rank of a plan without the others and without data; compare its collectives and memory with the plan.

    `plan` is a plan or the path of its file. Raises `InputError` for a plan that the engine does not run, and where PyTorch is
    not installed.

    >>> rehearse("no/plan.json")
    Traceback (most recent call last):
    ...
    shardwise.values.errors.InputError: plan file: cannot read no/plan.json: No such file or directory
    """
    return measure.rehearse_plan(read_plan(plan), rank, overrides)


def _flag_of_run(flag: str) -> Argument:
    """Return a flag that the ranks of a run have too: it is declared in `run.trainer.flags`."""
    settings = FLAGS[flag]
    return Argument(
        flag=flag, group=next(title for title, flags in FLAG_GROUPS.items() if flag in flags), help=settings["help"],
        metavar=settings.get("metavar"), choices=settings.get("choices"), repeat=settings.get("action") == "append",
        required=settings.get("required", False),
    )  # fmt: skip


class RunFlags(TypedDict, total=False):
    """Flags of `train`, which the ranks of the run are started with."""

    data: Annotated[Sequence[str], _flag_of_run("--data")]
    out: Annotated[str, _flag_of_run("--out")]
    steps: Annotated[int | str | None, _flag_of_run("--steps")]
    to_loss: Annotated[float | str | None, _flag_of_run("--to-loss")]
    resume: Annotated[bool, _flag_of_run("--resume")]
    elastic: Annotated[bool, _flag_of_run("--elastic")]
    initial: Annotated[str | None, _flag_of_run("--from")]
    force: Annotated[bool, _flag_of_run("--force")]
    device: Annotated[Literal["auto", "cpu", "cuda"], _flag_of_run("--device")]
    checkpoint_every: Annotated[int | str | None, _flag_of_run("--checkpoint-every")]
    keep_last: Annotated[int | str | None, _flag_of_run("--keep-last")]
    keep_every: Annotated[int | str | None, _flag_of_run("--keep-every")]
    policy: Annotated[Sequence[str], _flag_of_run("--policy")]
    noise_scale_every: Annotated[int | str | None, _flag_of_run("--noise-scale-every")]
    validate_every: Annotated[int | str | None, _flag_of_run("--validate-every")]
    learning_rate: Annotated[float | str | None, _flag_of_run("--learning-rate")]
    schedule: Annotated[str | None, _flag_of_run("--schedule")]
    warmup: Annotated[int | str | None, _flag_of_run("--warmup")]
    decay: Annotated[int | str | None, _flag_of_run("--decay")]
    seed: Annotated[int | str | None, _flag_of_run("--seed")]
    clip: Annotated[float | str | None, _flag_of_run("--clip")]
    reduce: Annotated[str | None, _flag_of_run("--reduce")]
    batch_schedule: Annotated[str | None, _flag_of_run("--batch-schedule")]
    batch_lr: Annotated[str | None, _flag_of_run("--batch-lr")]
    set: Annotated[Sequence[str], _flag_of_run("--set")]
    tensorboard: Annotated[bool, _flag_of_run("--tensorboard")]
    profile: Annotated[str | None, _flag_of_run("--profile")]
    json: Annotated[bool, _flag_of_run("--json")]  # by which ranks report errors


@verb(
    description=DESCRIPTION,
    examples=EXAMPLES,
    group_order=("run", "training", "output"),
    requires=("torch",),
    help_sections={OPTIMIZER_FIELDS_TITLE: optimizer_fields_text},
    shows_progress=False,
)
def train(
    plan: Annotated[str | os.PathLike[str], Argument(group="run", metavar="PLAN", help=PLAN_HELP)],
    **flags: Unpack[RunFlags],
) -> RunSummary:
    """Train the model of a plan as the plan says, on all devices of this machine, and return the run's summary.

    The ranks print their progress themselves. Raises `ShardwiseError` for problems found before the run starts, and `SystemExit`
    if the run reported why it ended: wrong input that only a rank could see, or a signal.
    """
    from shardwise.train import start_run  # the trainer, which no other verb of this module needs

    return RunSummary(start_run(make_arguments(os.fspath(plan), flags)))
