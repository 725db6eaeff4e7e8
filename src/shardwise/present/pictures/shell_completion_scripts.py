"""Scripts that let a shell complete the command line: each asks `shardwise completion` for what may stand at the cursor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict

from shardwise.values import lookup

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
