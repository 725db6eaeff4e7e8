"""Text and tokenizer as a user chooses them, and the corpus of token shards that is written of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwise.run.data.corpus_writer import DEFAULT_HELD_OUT, DEFAULT_VOCAB, write_corpus
from shardwise.run.data.documents import GLOBS, TextFile, find_text_files, python_library
from shardwise.run.data.shard_index import SPLITS, ShardIndex, index_payload
from shardwise.run.data.tokenizer import Tokenizer, load_tokenizer
from shardwise.values import InputError, Progress, argument_label, ignore_progress, parse_count, parse_quantity, run_all

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSelection:
    """Folders and files of text; of folders the files whose names match `globs` (none: the usual endings of text).

    `python_library` are bytes of the source of Python's standard library that are taken too; a text such as "4MB" says them.
    """

    sources: Sequence[PathLike] = ()
    globs: Sequence[str] = ()
    python_library: int | str | None = None

    def find_files(self) -> tuple[TextFile, ...]:
        """Return the files. Raises `InputError` for paths that are missing, and if nothing is selected."""
        label = argument_label("python_library")
        if not self.sources and self.python_library is None:
            raise InputError(f"tokenize: found no text; a folder, a file or {label} SIZE is required")
        library: tuple[TextFile, ...] = ()
        if self.python_library is not None:
            library = python_library(int(parse_quantity(str(self.python_library), label=label, unit="B")))
        sources = [os.fspath(source) for source in self.sources]
        return (*find_text_files(sources, self.globs or GLOBS), *library)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerChoice:
    """The file of a tokenizer with the token that ends a document; or the size of the one that is trained on the text."""

    file: PathLike | None = None
    vocab_size: int | str | None = None
    end_of_document: str | None = None

    def load(self) -> Tokenizer | None:
        """Return the tokenizer of the file; None if one is to be trained. Raises `InputError`."""
        file, vocab_size, end = (argument_label(name) for name in ("tokenizer", "vocab_size", "end_of_document"))
        if self.file is None:
            if self.end_of_document is not None:
                raise InputError(f"{end}: the tokenizer that is trained has its own; it is for a {file}")
            return None
        if self.vocab_size is not None:
            raise InputError(f"{vocab_size}: {file} has its own vocabulary; one of the two is required")
        return load_tokenizer(os.fspath(self.file), self.end_of_document)

    def parse_vocab_size(self) -> int:
        """Return the most tokens of a tokenizer that is trained. Raises `InputError`."""
        if not self.vocab_size:
            return DEFAULT_VOCAB
        return parse_count(self.vocab_size, label=argument_label("vocab_size"))


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedCorpus:
    """The index of the shards that were written; `is_tokenizer_trained` if their tokenizer was trained on their text."""

    index: ShardIndex
    is_tokenizer_trained: bool


def tokenize_text(
    text: TextSelection, choice: TokenizerChoice, out: PathLike, *, held_out: float | str = DEFAULT_HELD_OUT,
    force: bool = False, progress: Progress = ignore_progress,
) -> TokenizedCorpus:  # fmt: skip
    """Write the tokens of the selected text as shards into the folder `out`. Raises `InputError` with everything that is wrong.

    The fraction `held_out` of the documents goes to shards of its own; `force` replaces the shards of the folder.
    """
    files, tokenizer, vocab_size, held_out_share = run_all(
        text.find_files,
        choice.load,
        choice.parse_vocab_size,
        lambda: parse_quantity(str(held_out), label=argument_label("held_out"), unit=""),
    )
    index = write_corpus(
        files, os.fspath(out), tokenizer=tokenizer, vocab_size=vocab_size, held_out=held_out_share, force=force,
        progress=progress,
    )  # fmt: skip
    return TokenizedCorpus(index=index, is_tokenizer_trained=tokenizer is None)


def corpus_payload(corpus: TokenizedCorpus) -> dict[str, Any]:
    """Return the JSON of `shardwise tokenize --json`: the index, with the totals over the shards of each split."""
    payload = index_payload(corpus.index)
    for name in SPLITS:
        split = corpus.index.split(name)
        payload[name] |= {"num_tokens": split.num_tokens, "num_documents": split.num_documents}
    return payload
