"""`export`: a plan as a framework's launch; `read`: a launch as a plan; `convert`: weights as another framework reads them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

from shardwise import interop, search
from shardwise.hardware import load_cluster
from shardwise.model import load_model
from shardwise.present.arguments import read_plan
from shardwise.present.verb import Argument, Export, verb
from shardwise.serve import ServingDeployment
from shardwise.values import InputError, argument_label, parse_count, require_writable

if TYPE_CHECKING:
    from shardwise.hardware import Cluster
    from shardwise.interop import ConvertedModel, ConvertOptions, ExportedLaunch, PricedLaunch
    from shardwise.model import Architecture
    from shardwise.search import Plan

PlanOrServingPlan = Annotated[
    "str | os.PathLike[str] | Plan | ServingDeployment",
    Argument(
        group="plan",
        metavar="PLAN",
        help="a file that `shardwise plan --out`, `shardwise serve plan --out` or `shardwise serve estimate --out` wrote",
    ),
]
MEGATRON_RANKS = "megatron-ranks"  # the format of `convert` that is one of degrees


@verb(
    description="Write a plan as the launch of a framework: its configuration, a script that starts it, a batch script for "
    "SLURM and a page that says what they are. What the framework cannot run is refused with the nearest layout that it can; "
    "what no written option says is listed. `shardwise show targets` lists the frameworks with their releases.",
    examples=(
        "shardwise plan llama-3-8b h100:64 --batch-tokens 1Mi --seq-len 8Ki --stack megatron --out plan.json",
        "shardwise export plan.json --to megatron --out run/",
        "shardwise export plan.json --to megatron --json",
    ),
    group_order=("plan", "output"),
)
def export_plan(
    plan: PlanOrServingPlan,
    target: Annotated[
        str,
        Argument(
            flag="--to", group="plan", required=True, metavar="TARGET", completes="targets",
            help="the framework, as `shardwise show targets` names it; of a serving plan vllm, sglang or trtllm",
        ),
    ],
    out: Annotated[
        str | os.PathLike[str] | None,
        Argument(
            flag="--out", group="output", metavar="FOLDER",
            help="where to write the files; without it they are printed",
        ),
    ] = None,
    pools: Annotated[
        bool,
        Argument(
            flag="--pools", group="plan",
            help="of a serving plan: its best pools of prefill and decode in place of its layout",
        ),
    ] = False,
) -> ExportedLaunch:  # fmt: skip
    """Return a plan as the launch of a training framework: its files, and the command that starts them.

    `plan` is a plan or the path of its file, `target` a name that `shardwise show targets` lists. A serving plan or deployment is
    written as the launch of an engine: vllm, sglang or trtllm; with `pools` the best pools that the file of a plan names, instead
    of its layout. With `out` the files are written to that folder, which is made. Raises `InputError` if the framework cannot run
    the plan, with each reason and the nearest layout that it can.

    >>> import shardwise as sw
    >>> plan = sw.plan("llama-3-8b", "h100:16", global_batch_tokens="1Mi", seq_len=8192, stack="megatron")
    >>> launch = sw.export_plan(plan, "megatron")
    >>> launch.command, list(launch.files), launch.not_expressible
    ('bash launch.sh', ['launch.sh', 'launch.slurm', 'README.md'], ())
    """
    launch = _export_to(plan, target, pools=pools)
    return launch if out is None else interop.write_launch(launch, os.fspath(out), argument_label("out"))


def _export_to(plan: Plan | ServingDeployment | str | os.PathLike[str], target: str, *, pools: bool) -> ExportedLaunch:
    """Return a plan as a launch of a training framework, or a serving plan or deployment as one of an engine."""
    if isinstance(plan, (str, os.PathLike)) and search.is_serving_file(os.fspath(plan)):
        plan = search.load_deployment(os.fspath(plan), pools=pools)
    elif pools and not (isinstance(plan, ServingDeployment) and plan.pools):
        raise InputError(
            f"{argument_label('pools')}: found no pools; the file of a serving plan is required, or leave it out"
        )
    if not isinstance(plan, ServingDeployment):
        plan = read_plan(plan)
        if target in interop.ENGINES:
            raise InputError(
                f"{argument_label('target')}: {target} serves, and found a plan of a training; a serving plan is required, which "
                "`shardwise serve plan MODEL CLUSTER --out FILE` writes"
            )
        return interop.export(plan, interop.get_target(target))
    if target in interop.TARGETS:
        raise InputError(
            f"{argument_label('target')}: {target} trains, and found a serving plan; one of {', '.join(interop.ENGINES)} is "
            "required"
        )
    engine = interop.get_engine(target)
    return interop.export_pools(plan, engine) if plan.pools else interop.export_serving(plan, engine)


def _write_plan(launch: PricedLaunch, target: str) -> None:
    search.dump_plan(launch.plan, target)


@verb(
    description="Read the launch of a framework: its command line or configuration, as a model, a job and a layout; what it "
    "costs as it runs, whether it fits, and which of its options would make it faster. What is not understood is listed, never "
    "guessed. Nothing of what is read is run.",
    examples=(
        "shardwise plan llama-3-8b h100:16 --batch-tokens 1Mi --seq-len 8Ki --stack megatron --pin recompute=full --export run",
        "shardwise read run/launch.sh --cluster h100:16",
        "shardwise read run/launch.sh --cluster h200:16 --from megatron --json",
    ),
    exports=(Export(flag="--out", help="write the launch as a plan", write=_write_plan, prepare=require_writable),),
    group_order=("launch", "cluster", "output"),
    has_details=True,
)
def read_launch(
    files: Annotated[
        str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        Argument(group="launch", metavar="FILE", variadic=True, help="the files of the launch"),
    ],
    cluster: Annotated[
        str | os.PathLike[str] | Cluster,
        Argument(
            flag="--cluster", group="cluster", required=True, metavar="CLUSTER", completes="clusters",
            help="what it runs on, such as h100:64",
        ),
    ],
    *,
    target: Annotated[
        str | None,
        Argument(
            flag="--from", group="launch", metavar="TARGET", help="the framework, where its options do not tell it",
        ),
    ] = None,
    model: Annotated[
        str | os.PathLike[str] | Architecture | None,
        Argument(
            flag="--model", group="launch", metavar="MODEL", completes="models",
            help="the model, where the launch does not say it",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        Argument(
            flag="--recipe", group="launch", metavar="NAME",
            help="the function of a Python file with several recipes (Megatron Bridge, torchtitan)",
        ),
    ] = None,
    script_arguments: Annotated[
        Sequence[str],
        Argument(
            flag="--arg", group="launch", metavar="VALUE", repeat=True,
            help="an argument that the script is started with ($1 and further); may be repeated",
        ),
    ] = (),
    environment: Annotated[
        Sequence[str],
        Argument(
            flag="--env", group="launch", metavar="NAME=VALUE", repeat=True,
            help="a variable of the environment that the script is started in; may be repeated",
        ),
    ] = (),
    seq_len: Annotated[
        int | str | None,
        Argument(
            flag="--seq-len", group="launch", metavar="N",
            help="tokens of one sequence, where the launch does not say it",
        ),
    ] = None,
    batch_seqs: Annotated[
        int | str | None,
        Argument(
            flag="--batch-seqs", group="launch", metavar="N",
            help="sequences of one global batch, where the launch does not say it",
        ),
    ] = None,
    micro_batch_seqs: Annotated[
        int | str | None,
        Argument(
            flag="--micro-batch-seqs", group="launch", metavar="N", help="sequences of one micro-batch, likewise",
        ),
    ] = None,
    stack: str | None = None,
    user_fields: Mapping[str, int] | None = None,
) -> PricedLaunch:  # fmt: skip
    """Read the launch of a framework from its files: what it costs on a cluster, and which of its options would make it faster.

    It is predicted for the framework's own stack, unless a `stack` is named or the cluster was measured. `target` names the
    framework if its options are ambiguous, `recipe` the function of a file with several, `model` the model if the launch does not
    say it, and `seq_len`, `batch_seqs` and `micro_batch_seqs` what the launch leaves to the training script; `user_fields` has
    the same by field ({"job.seq_len": 4096}). `script_arguments` and `environment` (NAME=VALUE) are what its script is started
    with. The files are read, never run.

    Raises `InputError` for files that cannot be read or are not a launch, and for a layout that the cluster does not allow.

    >>> import shardwise as sw, tempfile, pathlib
    >>> text = '''torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    ...   --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu --disable-bias-linear
    ...   --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --vocab-size 128256
    ...   --untie-embeddings-and-output-weights --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --bf16
    ...   --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer'''.replace(chr(10), " ")
    >>> file = pathlib.Path(tempfile.mkdtemp(), "pretrain.sh")
    >>> _ = file.write_text(text)
    >>> launch = sw.read_launch(file, "h100:8")
    >>> launch.plan.model.name, str(launch.plan.layout)
    ('llama-3-8b', 'fsdp=4 tp=2 zero_stage=1 sequence_parallel=true micro_batch_seqs=1 recompute=none')
    """
    loaded_cluster = _load_cluster(cluster, stack)
    architecture = load_model(os.fspath(model)) if isinstance(model, (str, os.PathLike)) else model
    paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    texts = interop.read_files([os.fspath(path) for path in paths])
    texts = interop.with_script_context(texts, script_arguments, environment)
    arguments = {"job.seq_len": ("seq_len", seq_len), "job.global_batch_seqs": ("batch_seqs", batch_seqs),
                 "layout.micro_batch_seqs": ("micro_batch_seqs", micro_batch_seqs)}  # fmt: skip
    sizes = {
        field: parse_count(value, label=argument_label(name))
        for field, (name, value) in arguments.items()
        if value is not None
    }
    return interop.price_launch(
        texts,
        loaded_cluster,
        target=target,
        model=architecture,
        user_fields={**(user_fields or {}), **sizes},
        recipe=recipe,
    )


def _load_cluster(cluster: str | os.PathLike[str] | Cluster, stack: str | None) -> Cluster:
    if isinstance(cluster, (str, os.PathLike)):
        return load_cluster(os.fspath(cluster), stack=stack)
    if stack is not None:
        raise InputError(
            f"stack: found {stack!r} for a Cluster; the name of the cluster is required, or load_cluster(NAME, stack={stack!r})"
        )
    return cluster


def _size_argument(flag: str, help_text: str, group: str = "of megatron-ranks") -> Argument:
    return Argument(flag=flag, group=group, metavar="N", help=help_text)


@verb(
    description="Write a model's weights as another framework reads them, one tensor at a time: those of a run (its latest "
    "checkpoint), of one of its checkpoints, or of a folder of Hugging Face, torchtitan or Megatron-LM. Formats are huggingface "
    "(safetensors with a config.json), torchtitan (torch.distributed.checkpoint), megatron (torch_dist, for any degrees) and "
    "megatron-ranks (a file of each rank). A model that a framework does not compute is refused. `train --from` begins with any "
    "of these folders.",
    examples=(
        "shardwise convert runs/a --to huggingface --out hf",
        "shardwise convert runs/a/checkpoints/step-00000200 --to torchtitan --out titan --dtype bf16",
        "shardwise convert hf --to megatron-ranks --tp 8 --pp 4 --out megatron",
        "shardwise convert megatron --model llama-3-8b --seq-len 8192 --to huggingface --out hf",
    ),
    group_order=("weights", "of megatron-ranks", "output"),
    requires=("torch", "safetensors"),
)
def convert(
    folder: Annotated[
        str | os.PathLike[str],
        Argument(group="weights", metavar="DIR", help="a run, one of its checkpoints, or a folder of a framework"),
    ],
    to: Annotated[
        str,
        Argument(
            flag="--to", group="weights", required=True, metavar="FORMAT",
            help="huggingface, torchtitan, megatron or megatron-ranks",
        ),
    ],
    *,
    model: Annotated[
        str | None,
        Argument(
            flag="--model", group="weights", metavar="MODEL", completes="models",
            help="which model the folder has, where it does not say so: a plan, a name or a config.json",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        Argument(
            flag="--dtype", group="weights", metavar="NAME",
            help="fp64, fp32, fp16 or bf16 (default: what the weights are in)",
        ),
    ] = None,
    seq_len: Annotated[
        int | str | None,
        _size_argument("--seq-len", "of huggingface: the longest sequence that the model was trained for", "weights"),
    ] = None,
    tp: Annotated[
        int | str | None, _size_argument("--tp", "the degree of tensor parallelism (default: 1)")
    ] = None,
    pp: Annotated[
        int | str | None, _size_argument("--pp", "the degree of pipeline parallelism (default: 1)")
    ] = None,
    ep: Annotated[
        int | str | None, _size_argument("--ep", "the degree of expert parallelism (default: 1)")
    ] = None,
    transformer_impl: Annotated[
        str | None,
        Argument(
            flag="--transformer-impl", group="of megatron-ranks", metavar="NAME",
            help="transformer_engine (the default) or local",
        ),
    ] = None,
    make_vocab_size_divisible_by: Annotated[
        int | str | None,
        _size_argument("--make-vocab-size-divisible-by", "what the run pads a vocabulary to (default: 128)"),
    ] = None,
    out: Annotated[
        str | os.PathLike[str],
        Argument(
            flag="--out", group="output", required=True, metavar="DIR",
            help="where to write; a model that is there is replaced",
        ),
    ],
) -> ConvertedModel:  # fmt: skip
    """Write a model's weights in another format, one tensor at a time, and return what was written.

    `folder` is a run's (its latest checkpoint), one checkpoint's, or a framework's; `to` is "huggingface", "torchtitan",
    "megatron" or "megatron-ranks". `model` names the model where the folder does not. The degrees and what follows them are
    those of megatron-ranks. Raises `InputError` for what cannot be read, written or represented, and if PyTorch is not
    installed.

    >>> import shardwise as sw
    >>> sw.convert("nowhere", "huggingface", out="hf")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shardwise.values.errors.InputError: nowhere: found none of a model of transformers, ...
    """
    options = _convert_options(
        to, seq_len, {"tp": tp, "pp": pp, "ep": ep, "make_vocab_size_divisible_by": make_vocab_size_divisible_by},
        transformer_impl,
    )  # fmt: skip
    return interop.convert(os.fspath(folder), to, os.fspath(out), model=model, dtype=dtype, choices=options)


def _convert_options(
    to: str, seq_len: int | str | None, sizes: Mapping[str, int | str | None], transformer_impl: str | None
) -> ConvertOptions:
    """Return what the formats ask for. Raises `InputError` for an argument that this format does not take."""
    written = {**sizes, "transformer_impl": transformer_impl}
    labels = [argument_label(name) for name, value in written.items() if value is not None]
    if labels and to != MEGATRON_RANKS:
        raise InputError(
            f"{', '.join(labels)}: {to} is the same for any degrees; leave it out, or {argument_label('to')} {MEGATRON_RANKS} is "
            "required"
        )
    counts = {name: parse_count(size, label=argument_label(name)) for name, size in sizes.items() if size is not None}
    divisible = counts.pop("make_vocab_size_divisible_by", interop.RankDegrees().divisible)
    return interop.ConvertOptions(
        seq_len=None if seq_len is None else parse_count(seq_len, label=argument_label("seq_len")),
        degrees=interop.RankDegrees(**counts, divisible=divisible), implementation=transformer_impl or "transformer_engine",
    )  # fmt: skip
