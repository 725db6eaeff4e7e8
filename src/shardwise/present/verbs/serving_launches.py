"""`serve read`: what the launch of a serving engine says, what it costs, and whether it fits."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from shardwise import interop
from shardwise.hardware import Cluster, load_cluster
from shardwise.model import Architecture, load_model
from shardwise.present.verb import Argument
from shardwise.serve import Workload
from shardwise.values import InputError, argument_label, parse_count, parse_quantity

if TYPE_CHECKING:
    from shardwise.interop import PricedPools, PricedServing

LAUNCH = "of read"  # group of flags
MAX_PATH_CHARACTERS = 4096


def engine_names() -> tuple[str, ...]:
    """Return the names of the engines whose launches are read."""
    return tuple(interop.ENGINES)


def serve_read(
    launch: str | os.PathLike[str],
    cluster: str | os.PathLike[str] | Cluster | None = None,
    *,
    files: Annotated[
        Sequence[str | os.PathLike[str]],
        Argument(
            flag="--file", group=LAUNCH, metavar="FILE", repeat=True,
            help="a file that the launch names, such as that of --config; may be repeated",
        ),
    ] = (),
    target: Annotated[
        str | None,
        Argument(
            flag="--from", group=LAUNCH, metavar="ENGINE", choices=engine_names,
            help="the engine of a file of options that no command is beside",
        ),
    ] = None,
    served_model: Annotated[
        str | os.PathLike[str] | Architecture | None,
        Argument(
            flag="--model", group=LAUNCH, metavar="MODEL", completes="models",
            help="the model, where the catalogue does not have the checkpoint: a name or a config.json",
        ),
    ] = None,
    environment: Annotated[
        Sequence[str],
        Argument(
            flag="--env", group=LAUNCH, metavar="NAME=VALUE", repeat=True,
            help="a variable of the environment that the launch is started in; may be repeated",
        ),
    ] = (),
    isl: int | str | None = None,
    osl: int | str | None = None,
    concurrency: float | str | None = None,
    rate_per_s: float | None = None,
) -> PricedServing | PricedPools:  # fmt: skip
    """Read what an engine is started with: a command line, a script, a manifest, a file of options, or a folder of them; or the
    commands of a prefill and a decode pool, which are priced together.

    With a `cluster` it is priced, under the load of `isl`, `osl` and `concurrency` or `rate_per_s`. `served_model` is the model
    of a checkpoint that the catalogue does not have, `target` the engine of a file of options alone. Every field is shown with
    the option that it comes from, and options that change the answer without being priced are listed. Nothing is run. Raises
    `InputError` for what is not a launch, for options that the engine's release does not have, and for layouts that the model or
    the cluster does not allow.

    >>> import shardwise as sw
    >>> priced = sw.serve_read("vllm serve Qwen/Qwen3-32B --tensor-parallel-size 4 --max-num-seqs 256", "h100:4")
    >>> str(priced.reading.launch.layout), priced.verdict, priced.reading.launch.batch_limits.max_num_seqs
    ('tp=4', 'fits', 256)
    """
    folder = read_launch_texts(launch)
    texts = _with_environment(
        {**folder.texts, **interop.read_serving_files([os.fspath(path) for path in files])}, environment
    )
    architecture = load_model(os.fspath(served_model)) if isinstance(served_model, (str, os.PathLike)) else served_model
    checkpoint = architecture.name if architecture is not None else None
    try:
        reading = interop.read_deployment(
            texts, engine=target, architecture=architecture, checkpoint_default=checkpoint
        )
    except InputError as error:
        raise InputError(*error.problems, *folder.left_out) from None
    loaded = load_cluster(os.fspath(cluster)) if isinstance(cluster, (str, os.PathLike)) else cluster
    load = {"isl": isl, "osl": osl, "concurrency": concurrency, "rate_per_s": rate_per_s}
    priced = interop.price_deployment(reading, loaded, _read_workload(load))
    return replace(priced, notes=(*folder.left_out, *priced.notes))


def read_launch_texts(launch: str | os.PathLike[str]) -> interop.LaunchFolder:
    """Return the texts of a launch by name: of a file, of a folder's files, or of the command line that it is."""
    text = os.fspath(launch)
    is_path = len(text) < MAX_PATH_CHARACTERS and "\n" not in text and Path(text).exists()
    if is_path and Path(text).is_dir():
        return interop.read_serving_folder(Path(text))
    if is_path or " " not in text.strip():
        return interop.LaunchFolder(texts=interop.read_serving_files([text]))
    return interop.LaunchFolder(texts={interop.COMMAND_LINE: text})


def _with_environment(texts: Mapping[str, str], environment: Sequence[str]) -> Mapping[str, str]:
    """Return the texts with variables set before a script or a command line."""
    if not environment:
        return texts
    commands = {interop.COMMAND_LINE: texts[interop.COMMAND_LINE]} if interop.COMMAND_LINE in texts else texts
    return {**texts, **interop.with_script_context(commands, (), environment)}


def _read_workload(load: Mapping[str, Any]) -> Workload | None:
    """Return the workload that arguments say; None without any. Raises `InputError` where some of it is missing."""
    if all(value is None for value in load.values()):
        return None
    missing = [argument_label(name) for name in ("isl", "osl") if load[name] is None]
    if missing:
        raise InputError(
            f"{', '.join(missing)}: missing; a load is the tokens in and out, and how many requests there are"
        )
    concurrency, rate = load["concurrency"], load["rate_per_s"]
    if concurrency is None and rate is None:
        raise InputError(
            f"{argument_label('concurrency')} and {argument_label('rate_per_s')}: found neither; one of the two is required"
        )
    return Workload(
        isl=parse_count(load["isl"], label=argument_label("isl")), osl=parse_count(load["osl"], label=argument_label("osl")),
        concurrency=None if concurrency is None else parse_quantity(concurrency, label=argument_label("concurrency")),
        rate_per_s=rate,
    )  # fmt: skip
