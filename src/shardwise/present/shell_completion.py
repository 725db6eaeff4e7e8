"""Completion of command lines: what the last word may become, and the scripts that ask for it in bash, zsh and fish."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from typing_extensions import TypedDict

from shardwise.present.verb_parsers import add_verbs
from shardwise.present.verbs import GROUPS
from shardwise.values import Parser, lookup


class Completion(NamedTuple):
    """A word, and what a shell says beside it."""

    word: str
    said: str = ""


def complete(words: Sequence[str]) -> list[Completion]:
    """What the last of the words behind `shardwise`, which is being typed, may become; none where any text or file may.

    >>> [one.word for one in complete(["show", "pre"])]
    ['precisions']
    >>> [one.word for one in complete(["kv-cache", "llama-3-70b", "--con"])]
    ['--context']
    """
    *before, typed = words
    found = _complete_verb(before[0], before[1:], typed) if before else _verbs(typed)
    return [one for one in found if one.word.startswith(typed)]


def _verbs(typed: str) -> list[Completion]:
    if typed.startswith("-"):
        return [Completion("--help"), Completion("--version")]
    return [Completion(verb.name, verb.line) for group in GROUPS.values() for verb in group]


def _complete_verb(verb: str, before: Sequence[str], typed: str) -> Iterable[Completion]:
    parser = add_verbs(Parser()).get(verb)
    if parser is None:
        return []
    actions = parser.load_arguments()._actions
    flags = {name: action for action in actions for name in action.option_strings}
    taken, waiting = _split_words(before, flags)
    name, equals, _ = typed.partition("=")
    if waiting:
        return _values(waiting, taken)
    if equals and name in flags:
        return [Completion(f"{name}={one.word}") for one in _values(flags[name], taken)]
    if typed.startswith("-"):
        return _flags(flags)
    places = [action for action in actions if not action.option_strings and action.help != argparse.SUPPRESS]
    many = bool(places) and places[-1].nargs in ("*", "+")
    place = min(len(taken), len(places) - 1) if many else len(taken)
    return _values(places[place], taken) if place < len(places) else _flags(flags)


def _split_words(
    words: Sequence[str], flags: dict[str, argparse.Action]
) -> tuple[list[str], argparse.Action | None]:  # fmt: skip
    """The words that are no flags nor their values, and the flag that still waits for its value."""
    taken, waiting = [], None
    for word in words:
        if word.startswith("-"):
            action = flags.get(word)
            waiting = action if action is not None and action.nargs != 0 else None
        elif waiting:
            waiting = None
        else:
            taken.append(word)
    return taken, waiting


def _flags(flags: dict[str, argparse.Action]) -> Iterator[Completion]:
    for name, action in flags.items():
        if action.help != argparse.SUPPRESS and (len(name) > 2 or len(action.option_strings) == 1):
            yield Completion(name, " ".join(((action.help or "") % {**vars(action), "prog": ""}).split()))


def _values(action: argparse.Action, taken: Sequence[str]) -> list[Completion]:
    """What a flag or a place takes: its choices, the names of its catalogue, or what the words before make possible."""
    from shardwise.present.cli.show import names_of

    completes = getattr(action, "completes", "")
    if action.choices is not None:
        return [Completion(str(one)) for one in action.choices]
    return [Completion(one) for one in (completes(taken) if callable(completes) else names_of(completes))]


SCHEMA = "shardwise.completion/1"

# COMP_WORDS is cut at colons and signs of equality, so the line itself is handed over; what comes back begins behind them.
BASH = """_shardwise() {
    local word
    COMPREPLY=()
    while IFS= read -r word; do
        [[ -n $word ]] && COMPREPLY+=("$word")
    done < <("$1" completion bash -- "${COMP_LINE:0:COMP_POINT}" 2>/dev/null)
    if [[ ${COMPREPLY[0]} == *= ]] && type compopt &>/dev/null; then compopt -o nospace; fi
}
complete -o default -F _shardwise shardwise
"""
ZSH = """#compdef shardwise
_shardwise() {
    local -a found
    found=("${(@f)$("${(@Q)words[1]}" completion zsh -- "${(@Q)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z $found ]]; then
        _files
    elif [[ $found[1] == *=(|:*) ]]; then
        _describe shardwise found -S ''
    else
        _describe shardwise found
    fi
}
if [[ $zsh_eval_context[-1] == loadautofunc ]]; then _shardwise "$@"; else compdef _shardwise shardwise; fi
"""
FISH = """function __shardwise_ask
    set -l words (commandline -opc)
    set -l typed (commandline -ct)
    set -g __shardwise_found ($words[1] completion fish -- $words[2..-1] "$typed" 2>/dev/null)
    test -n "$__shardwise_found"
end
complete -c shardwise -n __shardwise_ask -f -a '(printf "%s\\n" $__shardwise_found)'
"""
SCRIPTS: Mapping[str, str] = {"bash": BASH, "zsh": ZSH, "fish": FISH}


class CompletionPayload(TypedDict):
    """The script of a shell, and what may stand at the end of a command line; null where none was given."""

    schema: Literal["shardwise.completion/1"]
    shell: str
    script: str
    candidates: list[str] | None


def completion_payload(shell: str, candidates: list[str] | None) -> dict[str, Any]:
    """What `shardwise completion --json` prints. Raises `InputError` for a shell that has no script."""
    return {"schema": SCHEMA, "shell": shell, "script": lookup(SCRIPTS, shell, "shell"), "candidates": candidates}
