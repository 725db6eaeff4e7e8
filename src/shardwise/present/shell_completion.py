"""Completion of command lines: candidates for the last word, and the scripts that ask for them in bash, zsh and fish.

The scripts ask `shardwise completion` at each Tab, so that names are those of the installed version, also where they depend on
the words before them, and all three shells offer the same. No library is used: shtab has no fish, and writes all names into the
script; argcomplete has all three, but is loaded by every command, for the hundred lines of `complete`.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from shardwise.present.catalogue_names import names_of
from shardwise.present.command_line import add_verbs
from shardwise.present.verbs import GROUPS
from shardwise.values import InputError, Parser, Payload, lookup

BASH_WORD_BREAKS = ":="  # characters at which bash ends a word


class Completion(NamedTuple):
    """A word, and what a shell prints beside it."""

    word: str
    help: str = ""


def complete(command_words: Sequence[str]) -> list[Completion]:
    """Return the completions of the last word of a command line behind `shardwise`; none where any text or file may follow.

    >>> [completion.word for completion in complete(["show", "pre"])]
    ['precisions']
    >>> [completion.word for completion in complete(["kv-cache", "llama-3-70b", "--con"])]
    ['--context']
    """
    *before, typed = command_words
    candidates = _complete_verb(before[0], before[1:], typed) if before else _verbs(typed)
    return [candidate for candidate in candidates if candidate.word.startswith(typed)]


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
    positional, waiting = _split_words(before, flags)
    name, equals, _ = typed.partition("=")
    if waiting:
        return _values(waiting, positional)
    if equals and name in flags:
        return [Completion(f"{name}={value.word}") for value in _values(flags[name], positional)]
    if typed.startswith("-"):
        return _flags(flags)
    places = [action for action in actions if not action.option_strings and action.help != argparse.SUPPRESS]
    takes_several = bool(places) and places[-1].nargs in ("*", "+")
    place = min(len(positional), len(places) - 1) if takes_several else len(positional)
    return _values(places[place], positional) if place < len(places) else _flags(flags)


def _split_words(
    command_words: Sequence[str], flags: dict[str, argparse.Action]
) -> tuple[list[str], argparse.Action | None]:  # fmt: skip
    """Return the words that are neither flags nor their values, and the flag that still waits for its value."""
    positional: list[str] = []
    waiting: argparse.Action | None = None
    for word in command_words:
        if word.startswith("-"):
            action = flags.get(word)
            waiting = action if action is not None and action.nargs != 0 else None
        elif waiting:
            waiting = None
        else:
            positional.append(word)
    return positional, waiting


def _flags(flags: dict[str, argparse.Action]) -> Iterator[Completion]:
    for name, action in flags.items():
        if action.help != argparse.SUPPRESS and (len(name) > 2 or len(action.option_strings) == 1):
            yield Completion(name, " ".join(((action.help or "") % {**vars(action), "prog": ""}).split()))


def _values(action: argparse.Action, positional: Sequence[str]) -> list[Completion]:
    """Return the values of a flag or a place: its choices, the names of its catalogue, or what the words before allow."""
    completes = getattr(action, "completes", "")
    if action.choices is not None:
        return [Completion(str(choice)) for choice in action.choices]
    return [Completion(word) for word in (completes(positional) if callable(completes) else names_of(completes))]


def bash_lines(command_words: Sequence[str]) -> list[str]:
    """Return completions from the last character at which bash ends a word. `command_words` is the line, in one text.

    Raises `InputError` for several texts.

    >>> bash_lines(["shardwise show clusters tpu-v5e:16x16"])
    ['16x16', '16x16*2']
    """
    if len(command_words) != 1:
        raise InputError(f"words: found {len(command_words)}; bash hands over its line as one word, in quotation marks")
    (line,) = command_words
    try:
        split = shlex.split(line)[1:]
    except ValueError:  # a quotation mark that is not closed yet
        split = line.split()[1:]
    typed = "" if line[-1:].isspace() or not split else split.pop()
    start = max(map(typed.rfind, BASH_WORD_BREAKS)) + 1
    return [completion.word[start:] for completion in complete([*split, typed])]


def zsh_lines(command_words: Sequence[str]) -> list[str]:
    """Return completions with their help behind a colon, as `_describe` takes them."""
    return [
        completion.word.replace(":", "\\:") + (f":{completion.help}" if completion.help else "")
        for completion in complete(command_words)
    ]


def fish_lines(command_words: Sequence[str]) -> list[str]:
    """Return completions with their help behind a tab."""
    return ["\t".join(filter(None, completion)) for completion in complete(command_words)]


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


_LINES: Mapping[str, Callable[[Sequence[str]], list[str]]] = {
    "bash": bash_lines, "zsh": zsh_lines, "fish": fish_lines,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class ShellCompletion(Payload):
    """The script of a shell, and the lines that complete a command line as the shell takes them; null without a command line."""

    SCHEMA = "shardwise.completion/1"

    shell: str
    script: str
    candidates: tuple[str, ...] | None = None


def complete_for_shell(shell: str, command_words: Sequence[str]) -> ShellCompletion:
    """Return the script of a shell, and the completions of a command line. Raises `InputError` for a shell that has no script."""
    script = lookup(SCRIPTS, shell, "shell")
    candidates = tuple(_LINES[shell](command_words)) if command_words else None
    return ShellCompletion(shell=shell, script=script, candidates=candidates)


def completion_text(completion: ShellCompletion) -> str:
    """Return what the command line prints: the completions, or the script."""
    return completion.script.rstrip() if completion.candidates is None else "\n".join(completion.candidates)
