"""Plans as launches of training frameworks, and launches as plans."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from shardwise.present.api.given import Model, Where, architecture_of, cluster_of
from shardwise.search import Plan

if TYPE_CHECKING:
    from shardwise.interop.launches.export_launch import ExportedLaunch
    from shardwise.interop.read_launch import PricedLaunch


def export_plan(plan: Plan, target: str) -> ExportedLaunch:
    """A plan as the launch of a training framework (`shardwise show targets`): its files, and the command that starts them.

    Raises `InputError` where the framework cannot run the plan, with each reason and the nearest layout that it can.

    >>> import shardwise as sw
    >>> found = sw.plan("llama-3-8b", "h100:16", global_batch_tokens="1Mi", seq_len=8192, stack="megatron")
    >>> launch = sw.export_plan(found, "megatron")
    >>> launch.command, list(launch.files), launch.not_expressible
    ('bash launch.sh', ['launch.sh', 'launch.slurm', 'README.md'], ())
    """
    from shardwise.interop import export, get_target

    return export(plan, get_target(target))


def read_launch(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], cluster: Where, *, target: str | None = None,
    model: Model | None = None, stack: str | None = None, beside: Mapping[str, int] | None = None,
) -> PricedLaunch:  # fmt: skip
    """The launch of a framework from its files: what it costs on a cluster, and which of its options would make it faster.

    It is predicted for the framework's own stack, unless a `stack` is named or the cluster was measured. `target` names the
    framework if its options are ambiguous, `model` the model if the launch does not say it, and `beside` has the values that
    the launch leaves to the training script, such as {"job.seq_len": 4096}. The files are read, never run.

    Raises `InputError` for files that cannot be read or are not a launch, and for a layout that the cluster does not allow.

    >>> import shardwise as sw, tempfile, pathlib
    >>> text = '''torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 --hidden-size 4096 --num-attention-heads 32
    ...   --group-query-attention --num-query-groups 8 --ffn-hidden-size 14336 --swiglu --disable-bias-linear
    ...   --normalization RMSNorm --position-embedding-type rope --rotary-base 500000 --vocab-size 128256
    ...   --untie-embeddings-and-output-weights --seq-length 8192 --micro-batch-size 1 --global-batch-size 128 --bf16
    ...   --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer'''.replace(chr(10), " ")
    >>> file = pathlib.Path(tempfile.mkdtemp(), "pretrain.sh")
    >>> _ = file.write_text(text)
    >>> found = sw.read_launch(file, "h100:8")
    >>> found.plan.model.name, str(found.plan.layout)
    ('llama-3-8b', 'fsdp=4 tp=2 zero_stage=1 sequence_parallel=true micro_batch_seqs=1 recompute=none')
    """
    from shardwise.interop import read_files
    from shardwise.interop.read_launch import price_launch

    paths = [files] if isinstance(files, (str, os.PathLike)) else list(files)
    texts = read_files([os.fspath(path) for path in paths])
    given = None if model is None else architecture_of(model)
    return price_launch(texts, cluster_of(cluster, stack), target=target, model=given, user_fields=beside)
