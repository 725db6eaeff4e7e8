"""`shardwise tokenize`: text to token shards that a trainer reads."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from shardwise.present.cli.arguments import add_output_arguments
from shardwise.present.rendering.report import Report, Row, Section, Table
from shardwise.values import Parser

if TYPE_CHECKING:
    from shardwise.run.data.documents import TextFile
    from shardwise.run.data.shard_index import ShardIndex
    from shardwise.run.data.tokenizer import Tokenizer

DESCRIPTION = """Write the tokens of text files as shards that a trainer maps into memory, with the tokenizer beside them.

A file is a document; of a .jsonl file every line is one, an object with a "text". A folder is walked in the order of its paths,
hidden files left out. Without --tokenizer a byte-level BPE is trained on the text itself."""
EXAMPLES = (
    "shardwise tokenize books/ --out data",
    "shardwise tokenize notes.md corpus.jsonl --tokenizer tokenizer.json --out data",
    "shardwise tokenize --python-library 4MB --vocab-size 4096 --held-out 0.05 --out data",
)


def configure(parser: Parser) -> None:
    """Declare the arguments."""
    text, tokenizer, output = parser.groups("text", "tokenizer", "output")
    text.add_argument("sources", nargs="*", metavar="DIR_OR_FILE", help="folders and files of text")
    output.add_argument("--out", required=True, metavar="DIR", help="the folder to write; it must not exist")
    text.add_argument(
        "--glob", action="append", metavar="PATTERN",
        help="files of folders to take, such as '*.txt'; may be repeated (default: txt, md, rst, py and jsonl)",
    )  # fmt: skip
    text.add_argument(
        "--python-library", metavar="SIZE",
        help="take so much of the source of Python's standard library too, such as 4MB: text that is always there",
    )  # fmt: skip
    tokenizer.add_argument("--tokenizer", metavar="FILE", help="a tokenizer.json to use (default: train one)")
    tokenizer.add_argument("--vocab-size", metavar="N", help="tokens of the tokenizer that is trained (default: 8Ki)")
    tokenizer.add_argument(
        "--end-of-document", metavar="TOKEN",
        help="of --tokenizer, the token that ends a document (default: the one that is known of published models)",
    )  # fmt: skip
    output.add_argument(
        "--held-out",
        default="0.01",
        metavar="FRACTION",
        help="part of the documents kept for validation (default: 0.01)",
    )
    output.add_argument("--force", action="store_true", help="replace the token shards that are there")
    add_output_arguments(parser)


def run(arguments: argparse.Namespace) -> str | Report:
    """The report, as text or as JSON; the shards are written first."""
    from shardwise.run.data.corpus_writer import DEFAULT_VOCAB, write_corpus
    from shardwise.run.data.shard_index import corpus_payload
    from shardwise.values import parse_count, parse_quantity, run_all

    sources, tokenizer, vocab_size, held_out = run_all(
        lambda: _sources(arguments),
        lambda: _tokenizer(arguments),
        lambda: parse_count(arguments.vocab_size, label="--vocab-size") if arguments.vocab_size else DEFAULT_VOCAB,
        lambda: parse_quantity(arguments.held_out, label="--held-out", unit=""),
    )
    index = write_corpus(
        sources, arguments.out, tokenizer=tokenizer, vocab_size=vocab_size, held_out=held_out, force=arguments.force,
        progress=arguments.progress,
    )  # fmt: skip
    return json.dumps(corpus_payload(index), indent=2) if arguments.json else _report(index, trained=tokenizer is None)


def _sources(arguments: argparse.Namespace) -> tuple[TextFile, ...]:
    from shardwise.run.data.documents import GLOBS, find_text_files, python_library
    from shardwise.values import InputError, parse_quantity

    if not arguments.sources and arguments.python_library is None:
        raise InputError("tokenize: found no text; a folder, a file or --python-library SIZE is required")
    library: tuple[TextFile, ...] = ()
    if arguments.python_library is not None:
        size = parse_quantity(arguments.python_library, label="--python-library", unit="B")
        library = python_library(int(size))
    return (*find_text_files(arguments.sources, arguments.glob or GLOBS), *library)


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer | None:
    from shardwise.run.data.tokenizer import load_tokenizer
    from shardwise.values import InputError

    if arguments.tokenizer is None:
        if arguments.end_of_document is not None:
            raise InputError("--end-of-document: the tokenizer that is trained has its own; it is for a --tokenizer")
        return None
    if arguments.vocab_size is not None:
        raise InputError("--vocab-size: --tokenizer has its own vocabulary; one of the two is required")
    return load_tokenizer(arguments.tokenizer, arguments.end_of_document)


def _report(index: ShardIndex, *, trained: bool) -> Report:
    from shardwise.run.data.shard_index import SPLITS
    from shardwise.values import format_bytes, pluralize

    rows: list[Row] = []
    for name in SPLITS:
        split = index.split(name)
        if not split.shards:
            rows.append((name, f"{'none':<21}", ""))
            continue
        said = (
            f"of {pluralize(split.num_documents, 'document')}, {format_bytes(split.text_bytes)} of text "
            f"({split.text_bytes / split.num_tokens:.2f} bytes per token), in {pluralize(len(split.shards), 'shard')} of "
            f"{index.dtype}"
        )
        rows.append((name, f"{split.num_tokens:,} tokens", said))
    origin = "trained on this text" if trained else "of a file"
    title = f"tokenizer {origin}: {index.vocab_size:,} tokens, {index.end_token} ends a document"
    table = Table(rows=tuple(rows), right=(1,), head=False, indent=2, line="  {:<9} {:>21} {}")
    return [Section([table, f"unigram entropy {index.unigram_entropy_nats:.3f} nats per token"], title=title)]
