"""The command line: parsers of all verbs, whose modules load when they are used; parse, run a verb, and print errors."""

from __future__ import annotations

import argparse
import errno
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from shardwise.present.verbs import GROUPS, OTHER_NAMES, VerbEntry
from shardwise.values import Parser, ShardwiseError, format_problems, write_error, write_text
from shardwise.values.argument_parser import EXIT_USAGE, wants_json
from shardwise.values.errors import EXIT_INTERRUPTED


class RootParser(Parser):
    """Parser of all verbs; for a name that is no verb it suggests the command line that is meant."""

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.dest == "verb" and value in OTHER_NAMES:
            raise argparse.ArgumentError(
                action, f"found {value!r}, which is no verb; use shardwise {OTHER_NAMES[value]}"
            )
        super()._check_value(action, value)


class VerbParser(Parser):
    """Parser of a verb, whose arguments are declared when they are first used."""

    def __init__(self, *, entry: VerbEntry, **settings: Any) -> None:
        super().__init__(add_help=False, **settings)
        self.entry, self._is_loaded = entry, False

    def load_arguments(self) -> VerbParser:
        """Return the parser with all of its arguments."""
        if not self._is_loaded:
            self._is_loaded = True
            verb = self.entry.load()
            verb.declare_arguments(self)
            self.group("output").add_argument("-h", "--help", action="help", help="print this help and exit")
            self.set_defaults(run=verb.run, shows_progress=verb.shows_progress)
        return self

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        return super(VerbParser, self.load_arguments()).parse_known_args(args, namespace)

    def format_help(self) -> str:
        return super(VerbParser, self.load_arguments()).format_help()


def add_verbs(parser: Parser) -> dict[str, VerbParser]:
    """Add all verbs to a parser; return their own parsers by name."""
    verbs = parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, parser_class=VerbParser, prog=parser.prog, help=argparse.SUPPRESS
    )
    return {entry.name: verbs.add_parser(entry.name, entry=entry) for group in GROUPS.values() for entry in group}


def format_verb_list() -> str:
    """Return the verbs in their groups, a line for each."""
    return "\n\n".join("\n".join(_group_lines(title, group)) for title, group in GROUPS.items())


def _group_lines(title: str, group: Sequence[VerbEntry]) -> Iterator[str]:
    yield f"{title}:"
    for entry in group:
        yield f"  {entry.name:<14}{entry.line}"


# Of paths that no file can have, which `Path.exists` and its like raise instead of returning False.
UNREADABLE_PATH = (errno.ENAMETOOLONG, errno.ELOOP)
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
        "fine, 1 what is printed cannot be written, 2 the input is wrong or a file cannot be written, 3 nothing fits, a limit is "
        "missed or a check fails, 130 stopped by Ctrl-C.",
    )  # fmt: skip
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    parser.set_defaults(exit_code=0)  # of what is printed; a verb may set another
    return parser, add_verbs(parser)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb. Exit codes: 0 fine, 1 what is printed cannot be written, 2 the input is wrong or a file cannot be written, 3
    nothing fits, a limit is missed or a check fails, 130 stopped by Ctrl-C. Without a verb it prints the help, on standard
    error."""
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
    except BrokenPipeError:
        return READER_LEFT
    except OSError as error:
        if error.errno not in UNREADABLE_PATH:
            raise
        path = str(error.filename)
        problem = f"cannot read {path if len(path) < 100 else path[:100] + '...'}: {error.strerror}"
        _complain(format_problems([problem], EXIT_USAGE, as_json=as_json), as_json=as_json)
        return EXIT_USAGE
    except KeyboardInterrupt:
        write_error((format_problems(["stopped"], EXIT_INTERRUPTED, as_json=True) if as_json else "stopped") + "\n")
        return EXIT_INTERRUPTED
    code: int = arguments.exit_code
    return code


def _complain(text: str, *, as_json: bool) -> None:
    from shardwise.present.run_and_print import print_error

    write_error(text + "\n") if as_json else print_error(text)


if __name__ == "__main__":
    sys.exit(main())
