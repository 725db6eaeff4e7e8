"""The command line: parse, run a verb, print its report or payload, and its errors."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from shardwise.present.verb_parsers import RootParser, VerbParser, add_verbs, format_verb_list
from shardwise.values import Parser, ShardwiseError, format_problems, write_error, write_text
from shardwise.values.argument_parser import EXIT_USAGE, wants_json
from shardwise.values.errors import EXIT_INTERRUPTED

READER_LEFT = 0  # `| head` has all that it wanted


class _Version(argparse.Action):
    """Print the version, which takes longer to find than to parse a command line."""

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        from shardwise.version import __version__

        write_text(f"shardwise {__version__}\n", sys.stdout)
        parser.exit()


def build_parser() -> Parser:
    """Return the parser of all verbs."""
    return _parsers()[0]


def verb_parsers() -> dict[str, VerbParser]:
    """Return the parsers of the verbs by name, each with all of its arguments."""
    return {name: parser.load_arguments() for name, parser in _parsers()[1].items()}


def _parsers() -> tuple[Parser, dict[str, VerbParser]]:
    parser = RootParser(
        prog="shardwise",
        usage="shardwise [-h] [--version] VERB ...",
        description="How to shard the training of a large transformer, what it costs, and what bounds it.\n\n"
        + format_verb_list(),
        epilog="`shardwise VERB --help` says what a verb takes, with examples. With --json an error is JSON too. Exit codes: 0 "
        "fine, 1 the output cannot be written or a rehearsal is not as planned, 2 the input is wrong, 3 nothing fits or a limit "
        "is missed, 130 stopped by Ctrl-C.",
    )  # fmt: skip
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.set_defaults(exit_code=0)  # of what is printed; a verb may set another
    return parser, add_verbs(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 fine, 1 the output cannot be written or a rehearsal is not as planned, 2 the input is wrong,
    3 nothing fits or a limit is missed, 130 stopped by Ctrl-C. Without a verb it prints the help, on standard error."""
    command_words = sys.argv[1:] if argv is None else argv
    as_json = wants_json(command_words)
    if not command_words:
        write_error(build_parser().format_help())
        return EXIT_USAGE
    try:
        arguments = build_parser().parse_args(argv)
        from shardwise.present.run_and_print import run_and_print  # `--help` does without

        run_and_print(arguments, keeps=argv is None)  # a process of its own, not a call in another's
    except ShardwiseError as error:
        _complain(format_problems(error.problems, error.exit_code, as_json=as_json), as_json=as_json)
        return error.exit_code
    except KeyboardInterrupt:
        write_error((format_problems(["stopped"], EXIT_INTERRUPTED, as_json=True) if as_json else "stopped") + "\n")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return READER_LEFT
    code: int = arguments.exit_code
    return code


def _complain(text: str, *, as_json: bool) -> None:
    from shardwise.present.run_and_print import print_error

    write_error(text + "\n") if as_json else print_error(text)


if __name__ == "__main__":
    sys.exit(main())
