"""State of the explorer as one value, and its address: the query of a URL.

`parse_query` and `write_query` are the only codec between them. Names are those of the command line's flags, a layout is the
text that `--layout` takes, and a key with a dot is what `--set` takes. The page only edits the query.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from shardwise.layout import Layout
from shardwise.values import (
    InputError,
    did_you_mean,
    format_binary,
    parse_count,
    parse_overrides,
    parse_quantity,
    raise_problems,
)

VIEWS = ("overview", "notation", "memory", "schedule", "batch", "serving", "run")
# Parameters of a view, or of a question beside the views.
DETAILS = (
    "term", "target", "unit", "noise_tokens", "min_steps", "isl", "osl", "rate", "ttft", "tpot", "engine",
)  # fmt: skip
TEXTS = ("model", "cluster", "stack", "precision", "overlap")
COUNTS = ("batch_tokens", "seq_len")
KEYS = ("view", "task", *TEXTS, *COUNTS, "tokens", "layout", *DETAILS)
ROOMS = ("model", "job")  # whose values a key with a dot replaces
# Limits of an address: a browser sends as much, and no state needs more.
MOST_CHARACTERS, MOST_VALUE, MOST_KEYS = 4096, 512, 40
MOST_CHANGES = 16  # values of the model and the job
PLAIN = ":=,@"  # characters of values that need no escape in a query (RFC 3986, 3.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Model, cluster, stack, job, layout and view. `layout` None is the best that a search finds; `batch_tokens` and `seq_len`
    None are those of the model's usual job; `changes` are values of the model or the job, by ROOM.NAME, as text; `details` are
    parameters of the view; `task` is the task that is worked on (`tasks`).

    >>> state = parse_query("model=gpt-2&cluster=h100:8&batch_tokens=64Ki&seq_len=1024&layout=tp=2+fsdp=4")
    >>> state.batch_tokens, state.layout.tp
    (65536, 2)
    >>> parse_query(write_query(state)) == state
    True
    """

    view: str = "overview"
    model: str = "llama-3-8b"
    cluster: str = "h100:64"
    stack: str | None = None
    batch_tokens: int | None = None
    seq_len: int | None = None
    tokens: float | None = None
    precision: str = "bf16"
    overlap: str | None = None
    layout: Layout | None = None
    changes: tuple[tuple[str, str], ...] = ()
    details: tuple[tuple[str, str], ...] = ()
    task: str | None = None

    @property
    def setting(self) -> State:
        """Return the state without its layout, its view and that view's details: the setting of a search."""
        return replace(self, view="overview", layout=None, details=(), task=None)

    def detail(self, name: str) -> str | None:
        """Return a detail by name; None if the address lacks it."""
        return dict(self.details).get(name)


def parse_query(query: str) -> State:
    """Return the state of an address; what it leaves out is as in `State()`. Raises `InputError` with all problems."""
    values = _pairs(query)
    unknown = [key for key in values if key not in KEYS and key.partition(".")[0] not in ROOMS]
    problems = [
        f"query: found {key[:60]!r}{did_you_mean(key, KEYS)}; one of {', '.join(KEYS)} is required" for key in unknown
    ]
    long = {key: value for key, value in values.items() if len(value) > MOST_VALUE or not value.isprintable()}
    problems += [
        f"{key}: found {value[:60]!r}; at most {MOST_VALUE} printable characters are required"
        for key, value in long.items()
    ]
    problems += [f"{key}: found no value; one is required" for key, value in values.items() if "." in key and not value]
    raise_problems(problems)
    if values.get("view", VIEWS[0]) not in VIEWS:
        raise InputError(f"view: found {values['view']!r}; one of {', '.join(VIEWS)} is required")
    fields: dict[str, Any] = {key: values[key] for key in ("view", "task", *TEXTS) if values.get(key)}
    fields |= {key: parse_count(values[key], label=key) for key in COUNTS if values.get(key)}
    if values.get("tokens"):
        fields["tokens"] = parse_quantity(values["tokens"], label="tokens", unit="")
    if values.get("layout"):
        fields["layout"] = Layout.parse(values["layout"])
    changes = {key: value for key, value in values.items() if "." in key}
    if len(changes) > MOST_CHANGES:
        raise InputError(f"query: found {len(changes)} changed values; at most {MOST_CHANGES} are required")
    parse_overrides((f"{key}={value}" for key, value in changes.items()), ROOMS)
    details = tuple((key, values[key]) for key in DETAILS if values.get(key))
    return State(**fields, changes=tuple(sorted(changes.items())), details=details)


def _pairs(query: str) -> Mapping[str, str]:
    """Return keys and values of a query. Raises `InputError` if it is too long, no text, or repeats a key."""
    if len(query) > MOST_CHARACTERS:
        raise InputError(f"query: found {len(query):,} characters; at most {MOST_CHARACTERS:,} are required")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=MOST_KEYS)
    except ValueError:
        raise InputError(f"query: not UTF-8, or more than {MOST_KEYS} keys; KEY=VALUE&KEY=VALUE is required") from None
    keys = [key for key, _ in pairs]
    repeated = sorted({key[:60] for key in keys if keys.count(key) > 1})
    raise_problems([f"query: found {key!r} more than once; each key once is required" for key in repeated])
    return dict(pairs)


def write_query(state: State) -> str:
    """Return the address of a state: its query, without the question mark."""
    texts: dict[str, str | None] = {
        "task": state.task, "view": state.view if state.view != VIEWS[0] else None, **{key: getattr(state, key) for key in TEXTS},
        "batch_tokens": None if state.batch_tokens is None else format_binary(state.batch_tokens),
        "seq_len": None if state.seq_len is None else str(state.seq_len),
        "tokens": None if state.tokens is None else f"{state.tokens:.17g}",
        "layout": None if state.layout is None else layout_text(state.layout), **dict(state.changes), **dict(state.details),
    }  # fmt: skip
    return urlencode({key: value for key, value in texts.items() if value is not None}, safe=PLAIN)


def layout_text(layout: Layout) -> str:
    """Return a layout as an address writes it: with its placement, which `str` leaves out."""
    return f"{layout} placement={layout.placement}" if layout.placement else str(layout)
