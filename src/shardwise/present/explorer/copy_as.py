"""Text of a state to paste: a command, Python, or the launch of a framework."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardwise.hardware import default_precision
from shardwise.interop import TARGETS, export, get_target
from shardwise.interop.launches.launch import launch_from_plan
from shardwise.interop.launches.translate_launch import choose_precision, refusals
from shardwise.present.explorer.opened_plan import OPENED
from shardwise.present.explorer.request import ViewRequest
from shardwise.present.explorer.state import layout_text
from shardwise.values import ShardwiseError, format_binary

TEXTS = ("command", "python")


def copy(request: ViewRequest) -> dict[str, Any]:
    """Return the text of the detail `target` (`command`, `python` or a target of `export`), and the names of all targets."""
    request.require_legal()
    name = request.state.detail("target") or TEXTS[0]
    return {"target": name, "targets": [*TEXTS, *TARGETS], **_text(request, name)}


def _text(request: ViewRequest, name: str) -> dict[str, Any]:
    if name in TEXTS:
        return _files({name: command(request) if name == "command" else python(request)})
    target, plan = get_target(name), request.plan
    try:
        reasons = refusals(choose_precision(launch_from_plan(plan), target), target)
        if reasons:
            return _files({}, problems=[f"{target.title} {target.version} cannot run this layout", *reasons])
        exported = export(plan, target)
    except ShardwiseError as error:
        return _files({}, problems=error.problems)
    return _files(exported.files, notes=[*exported.not_expressible, *exported.warnings])


def _files(files: Mapping[str, str], problems: Sequence[str] = (), notes: Sequence[str] = ()) -> dict[str, Any]:
    return {"files": dict(files), "problems": list(problems), "notes": list(notes)}


def command(request: ViewRequest) -> str:
    """Return the command that prices the layout, or compares it with a plan whose model or cluster is not in the catalogue."""
    state = request.state
    if OPENED in state.model or OPENED in state.cluster:
        return f"shardwise explain plan.json --against {shlex.quote(layout_text(request.layout))}"
    layout = layout_text(request.layout)
    return shlex.join(["shardwise", "estimate", state.model, state.cluster, *_flags(request), "--layout", layout])


def _flags(request: ViewRequest) -> Iterator[str]:
    state = request.state
    yield from ("--batch-tokens", format_binary(request.job.global_batch_tokens), "--seq-len", str(request.job.seq_len))
    arguments = {
        "--stack": state.stack,
        "--overlap": state.overlap,
        "--tokens": None if state.tokens is None else f"{state.tokens:g}",
    }
    yield from (word for flag, value in arguments.items() if value is not None for word in (flag, value))
    if state.precision != default_precision(state.stack, [request.cluster.chip]):
        yield from ("--precision", state.precision)
    for key, value in state.changes:
        yield from ("--set", f"{key}={value}")


def python(request: ViewRequest) -> str:
    """Return the Python code that prices the layout."""
    state, text = request.state, layout_text(request.layout)
    if OPENED in state.model or OPENED in state.cluster:
        return f'import shardwise as sw\n\nsw.explain("plan.json", {text!r})\n'
    changed = [key.partition(".")[::2] for key, _ in state.changes]
    fields: dict[str, Any] = {
        "layout": text, "global_batch_tokens": request.job.global_batch_tokens, "seq_len": request.job.seq_len,
        "tokens": state.tokens,
        "precision": None if state.precision == default_precision(state.stack, [request.cluster.chip]) else state.precision,
        "overlap": state.overlap, "stack": state.stack,
        **{name: getattr(request.job, name) for room, name in changed if room == "job"},
    }  # fmt: skip
    arguments = "".join(f", {name}={value!r}" for name, value in fields.items() if value is not None)
    sizes = "".join(f", {name}={getattr(request.model, name)!r}" for room, name in changed if room == "model")
    model = f"replace(sw.load_model({state.model!r}){sizes})" if sizes else repr(state.model)
    imports = "from dataclasses import replace\n\n" if sizes else ""
    return f"{imports}import shardwise as sw\n\nsw.estimate({model}, {state.cluster!r}{arguments})\n"
