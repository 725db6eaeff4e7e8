"""Names of arguments in error messages: the parameter for a Python caller, the flag for the command line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

_LABELS: ContextVar[Mapping[str, str]] = ContextVar("argument_labels", default={})  # noqa: B039 - never changed in place


def argument_label(parameter: str, default: str | None = None) -> str:
    """Return what an error message calls a parameter: its flag on a command line, else `default` or its own name.

    >>> argument_label("seq_len", "job: seq_len")
    'job: seq_len'
    >>> with label_arguments({"seq_len": "--seq-len"}):
    ...     argument_label("seq_len", "job: seq_len")
    '--seq-len'
    """
    return _LABELS.get().get(parameter, default or parameter)


@contextmanager
def label_arguments(labels: Mapping[str, str]) -> Iterator[None]:
    """Let errors name parameters as these labels do, while a verb of the command line runs."""
    token = _LABELS.set(labels)
    try:
        yield
    finally:
        _LABELS.reset(token)
