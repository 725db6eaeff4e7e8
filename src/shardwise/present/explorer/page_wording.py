"""Wording of the page: its readers have controls and an address, and no command line."""

from __future__ import annotations

import re
from collections.abc import Mapping

# What an error calls a parameter: the label of its control, or the key of the address (`values.errors`).
PAGE_LABELS: Mapping[str, str] = {
    "global_batch_tokens": "batch, tokens", "seq_len": "sequence length", "tokens": "run, tokens",
    "precision": "precision", "stack": "stack", "overlap": "overlap", "optimizer": "optimizer", "layout": "layout",
    "overrides": "the address key", "pin": "the layout field", "dtype": "precision", "round_size": "round size", "term": "term",
}  # fmt: skip
FLAGS = re.compile(r"(?<![\w-])--([a-z][a-z-]*)( [A-Z]+\b)?")
# Notes of an estimate are part of the payload of `estimate --json`, which stays as the command prints it.
NOTES = (
    (" (--stack NAME predicts; see: show stacks)", " (a stack, chosen under Job, predicts)"),
    ("--stack NAME narrows the interval", "a stack, chosen under Job, narrows the interval"),
)


def page_wording(text: str) -> str:
    """Return a text without flags of the command line.

    >>> page_wording("the stack is not known: --stack NAME narrows the interval")
    'the stack is not known: a stack, chosen under Job, narrows the interval'
    >>> page_wording("run again with --noise-scale-every N")
    'run again with the option noise-scale-every'
    """
    for flag_text, page_text in NOTES:
        text = text.replace(flag_text, page_text)
    return FLAGS.sub(lambda flag: f"the option {flag[1]}", text)
