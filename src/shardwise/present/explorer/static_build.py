"""Static build of the page: computed answers in place of a server, for examples and the neighbours of their best layout.

It opens from any web host and from a disk (file://): answers are scripts, as a page from a disk may fetch nothing.

- index.html: the page's own modules as one script, its styles, and the list of examples
- answers/EXAMPLE.js: every answer of an example; values that answers share are stored once, and all are compressed
"""

from __future__ import annotations

import base64
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

from shardwise.interop import TARGETS
from shardwise.present.explorer.background_search import Values, report_searches
from shardwise.present.explorer.control_values import Option, select
from shardwise.present.explorer.copy_as import TEXTS
from shardwise.present.explorer.explain_number import list_number_names
from shardwise.present.explorer.explorer import Explorer
from shardwise.present.explorer.opened_plan import NameResolver
from shardwise.present.explorer.page_files import inline_page, page_body
from shardwise.present.explorer.page_wording import PAGE_LABELS
from shardwise.present.explorer.state import KEYS, PLAIN, State, write_query
from shardwise.present.rendering.numbers import num_bytes
from shardwise.present.rendering.report import Line, Report, Section
from shardwise.values import InputError, Progress
from shardwise.values.errors import label_arguments
from shardwise.values.progress import ignore_progress


class Example(NamedTuple):
    """A training job of the build; batch and sequence default to those of `plan` for the model."""

    model: str
    cluster: str
    batch_tokens: int | None = None
    seq_len: int | None = None
    precision: str = "bf16"

    @property
    def name(self) -> str:
        """Return the name of its file, without the suffix."""
        return f"{self.model}-{self.cluster}".replace(":", "-")

    @property
    def title(self) -> str:
        """Return its name on the page."""
        return f"{self.model} on {self.cluster}"


# Well-known models on usual clusters; the jobs with a batch are presets of the page.
EXAMPLES = (
    Example("llama-3-8b", "h100:64"), Example("llama-3-8b", "h100:8"), Example("llama-3.2-1b", "h100:8"),
    Example("llama-3-70b", "h100:64"), Example("llama-3-70b", "h100:512"), Example("llama-3-405b", "h100:16384"),
    Example("gpt-2", "a100-40gb:8", 480 * 1024, 1024), Example("gpt-3-175b", "a100-80gb:1024", 1536 * 2048, 2048),
    Example("mixtral-8x7b", "h100:128"), Example("deepseek-v3", "h800:2048", 15360 * 4096, 4096, "fp8_deepseek_v3"),
    Example("gemma-2-9b", "tpu-v5p:4x4x4"), Example("qwen3-32b", "h200:256"),
)  # fmt: skip
BEST_LAYOUT_VIEWS = ("timeline", "schedule")  # pictures of passes, drawn for the best layout alone
MAX_FRONT = 12  # layouts of the Pareto front
VIEWS = ("overview", "notation", "schedule", "batch")  # the sizes of the memory view lead out of the build
OMITTED = (
    "Not in it: other models, clusters, batches, sequences, precisions and stacks; layouts that differ from the best in more "
    "than one choice, unless they are on the Pareto front; the simulated step, the schedule, the terms' formulas and the "
    "launches of other layouts than the best; the memory view, tasks, opened plans and runs."
)


class _FinishedSearch:
    """Searches that answer with a report."""

    def __init__(self, report: Mapping[str, Any]) -> None:
        self.report = report

    def ask(self, setting: State, values: Values) -> Mapping[str, Any]:
        """Return the report."""
        return self.report


def write_static_build(
    folder: str | os.PathLike[str], progress: Progress = ignore_progress, examples: Sequence[Example] = EXAMPLES
) -> list[Path]:
    """Write the build into a folder, which is created; return the files.

    Raises `InputError` if the folder cannot be written, and for an example without a layout that fits.
    """
    target = Path(folder)
    answers = target / "answers"
    try:
        answers.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"static build: cannot write {target}: {error.strerror}; choose a writable folder") from None
    files = []
    starts = [_start_query(example) for example in examples]
    for number, example in enumerate(examples, 1):
        progress(f"search and views of {example.title}", number, len(examples))
        store, starts[number - 1] = _example_answers(example, examples, progress)
        files.append(_write(answers / f"{example.name}.js", _answers_script(example.name, store)))
    files.append(_write(target / "index.html", _index(examples, starts)))
    return files


def _write(path: Path, text: str) -> Path:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"static build: cannot write {path}: {error.strerror}; choose a writable folder") from None
    return path


def _start_state(example: Example) -> State:
    state = State(
        model=example.model, cluster=example.cluster, batch_tokens=example.batch_tokens, seq_len=example.seq_len,
        precision=example.precision,
    )  # fmt: skip
    return NameResolver().with_usual_job(state)


def _start_query(example: Example) -> str:
    return write_query(_start_state(example))


def _example_answers(example: Example, examples: Sequence[Example], progress: Progress) -> tuple[Store, str]:
    """Return the answers of an example, and the query of its best layout."""
    state, resolver = _start_state(example), NameResolver()
    with label_arguments(PAGE_LABELS):
        *_, report = report_searches(
            resolver.model(state), resolver.cluster(state), resolver.job(state), ignore_progress
        )
    if report["best"] is None:
        raise InputError(f"static build: {example.title}: {report['problems'][0]}")
    explorer = Explorer(resolver, _FinishedSearch(report))
    best = edit_query(_start_query(example), {"layout": report["best"]["layout"]})
    queries = list(_neighbours(explorer, best, report))
    store, available = Store(), {canonical(query) for query in queries}
    for number, query in enumerate(queries, 1):
        progress(f"{example.title}: layouts", number, len(queries))
        overview = explorer.answer("overview", query)
        store.add("overview", query, _without_server(overview, example, examples, available))
        for question, question_query in _questions(query, overview, is_best=query == best):
            payload = explorer.answer(question, question_query)
            store.add(question, question_query, _without_server(payload, example, examples, available))
    return store, best


def _neighbours(explorer: Explorer, best: str, report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the query of the best layout, then once of each layout that differs in one choice or is on the front."""
    yield best
    edits = [option["edit"] for control in explorer.answer("overview", best)["controls"] if control["group"] == "layout"
             for option in control["options"] if option["edit"]]  # fmt: skip
    front = report.get("front", ())
    edits += [{"layout": point["layout"]} for point in front[:: -(-len(front) // MAX_FRONT) or 1]]
    seen = {canonical(best)}
    for edit in edits:
        query = edit_query(best, edit)
        if canonical(query) not in seen:
            seen.add(canonical(query))
            yield query


def _questions(query: str, overview: Mapping[str, Any], *, is_best: bool) -> Iterator[tuple[str, str]]:
    """Yield the other questions of the page about a layout; for the best one also passes, terms and launches.

    With the passes of every layout a build is ten times as large.
    """
    yield "copy", edit_query(query, {"target": "command"})
    yield "copy", edit_query(query, {"target": "python"})
    yield "pareto", query
    if overview["problems"]:
        return
    yield "roofline", query
    yield from (
        (view, edit_query(query, {"view": view})) for view in VIEWS if view not in ("overview", *BEST_LAYOUT_VIEWS)
    )
    if not is_best:
        return
    yield "timeline", query
    yield "schedule", edit_query(query, {"view": "schedule"})
    priced = overview["estimate"]["estimate"]
    names = list_number_names(priced["time"], priced["memory"])
    yield from (("why", edit_query(query, {"term": name})) for name in names)
    yield from (("copy", edit_query(query, {"target": name})) for name in TARGETS if name not in TEXTS)


def _without_server(
    payload: dict[str, Any], example: Example, examples: Sequence[Example], available: set[str]
) -> dict[str, Any]:
    """Return an answer with the build's choices: other examples, and options with an answer in the build."""
    if "controls" not in payload:
        return payload
    controls, query = [], edit_query(payload["query"], {"view": None})
    # A drag back to the current value returns to the state that it began with.
    unchanged = {"layout": dict(parse_qsl(query))["layout"]}
    for control in payload["controls"]:
        options = [
            {**option, "edit": unchanged} if option["value"] == control["value"] else option
            for option in control["options"]
            if option["value"] == control["value"] or canonical(edit_query(query, option["edit"])) in available
        ]
        if len(options) > 1:
            controls.append({**control, "options": options})
    return {**payload, "controls": [_example_control(example, examples), *controls], "tasks": []}


def _example_control(example: Example, examples: Sequence[Example]) -> dict[str, Any]:
    """Return the choice of an example, which replaces the whole address."""
    removed = dict.fromkeys(KEYS)
    options = (
        Option(value=option.title, edit={**removed, **dict(parse_qsl(_start_query(option)))}) for option in examples
    )
    return select("example", "example", "job", example.title, options).payload()


class Store:
    """Answers by question and state. Fields, controls and sections that answers share are stored once."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self.indices: dict[str, int] = {}
        self.answers: dict[str, dict[str, Any]] = {}

    def add(self, question: str, query: str, payload: Mapping[str, Any]) -> None:
        """Add an answer."""
        self.answers[f"{question}?{canonical(query)}"] = {
            name: [self._store(part) for part in value] if name in ("controls", "report") else self._store(value)
            for name, value in payload.items()
        }

    def _store(self, value: Any) -> int:
        """Return the index of a value, which is added if it is new."""
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        if text not in self.indices:
            self.indices[text] = len(self.values)
            self.values.append(text)
        return self.indices[text]

    def text(self) -> str:
        """Return the answers as JSON."""
        return f'{{"values":[{",".join(self.values)}],"answers":{json.dumps(self.answers, separators=(",", ":"))}}}'


def canonical(query: str) -> str:
    """Return a query with its keys in order: the key of an answer in the build."""
    return "&".join(sorted(query.split("&")))


def edit_query(query: str, edit: Mapping[str, str | None]) -> str:
    """Return a query with other values of some keys; None removes a key. The page edits its address alike.

    >>> edit_query("model=gpt-2&layout=dp=8", {"layout": "tp=2 dp=4", "view": None})
    'model=gpt-2&layout=tp=2+dp=4'
    """
    values = {**dict(parse_qsl(query)), **edit}
    return urlencode({key: value for key, value in values.items() if value is not None}, safe=PLAIN)


def _answers_script(name: str, store: Store) -> str:
    # Without a time stamp equal answers are equal bytes.
    data = base64.b64encode(gzip.compress(store.text().encode(), mtime=0)).decode()
    return f'shardwiseAnswers("{name}","{data}");\n'


def _index(examples: Sequence[Example], starts: Sequence[str]) -> str:
    example_payloads = [
        {"name": example.name, "model": example.model, "cluster": example.cluster, "query": start}
        for example, start in zip(examples, starts, strict=True)
    ]
    note = (
        f"Static build of shardwise {version('shardwise')}: {len(examples)} examples, each with its best layout and the layouts "
        "next to it. "
    )
    head, header, main = (
        page_body().replace("pricing the first layout", "loading the first example").partition("</header>\n")
    )
    about_build = (
        f'<details class="static-note" open><summary>{note}</summary><p>{OMITTED} For all of these: '
        "<code>pip install 'shardwise[explore]'</code>, then <code>shardwise explore</code>.</p></details>\n"
        '<p id="unavailable" class="static-note" role="status" hidden></p>\n'
    )
    body = head + header + about_build + main
    # Answers are scripts next to the page; on a disk their scheme is file.
    return inline_page(
        "shardwise explore",
        body,
        "main",
        {"examples": example_payloads, "views": VIEWS},
        payload_id="build",
        scripts="'self' file:",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StaticBuild:
    """Files of a build of the page that needs no server; the last is the page."""

    files: tuple[Path, ...]


def build_report(build: StaticBuild) -> Report:
    """Report the page, and how large the build is."""
    size = num_bytes(sum(file.stat().st_size for file in build.files))
    line = Line((f"{len(build.files)} files, ", size, "; open the page from a disk or any web host"))
    return [Section([str(build.files[-1]), line])]
