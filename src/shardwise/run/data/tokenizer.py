"""Tokenizers: a byte-level BPE trained on the corpus itself, or any tokenizer.json.

Training runs in a thread of its own, because the library ignores Ctrl-C.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from shardwise.values import FileMessages, InputError, describe_error, parse_json, read_bytes

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine


END_OF_DOCUMENT = "<|endoftext|>"
# The end of a document in the tokenizers of published models: GPT-2 and Qwen, Llama 3, Llama 2 and Mistral, Gemma, DeepSeek.
KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<｜end▁of▁sentence｜>")
MIN_VOCAB = 256 + 1  # every byte, and the end of a document


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """A tokenizer with the token that ends a document; `text` is its tokenizer.json."""

    engine: Engine
    text: bytes
    end_token: str
    end_id: int

    @property
    def vocab_size(self) -> int:
        """The rows that an embedding needs: the largest token id plus one."""
        return max(self.engine.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The smallest little-endian dtype that holds every id."""
        return np.dtype("<u2" if self.vocab_size <= 2**16 else "<u4")

    @property
    def sha256(self) -> str:
        """Hash of the tokenizer.json."""
        return hashlib.sha256(self.text).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[np.ndarray[tuple[int], np.dtype[np.generic]]]:
        """Return the token ids of each text, followed by the end of the document."""
        encoded = self.engine.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array([*encoding.ids, self.end_id], self.dtype) for encoding in encoded]


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) of at most `vocab_size` tokens.

    Equal texts give equal tokenizers. A short corpus gives fewer tokens, when no pair is left to merge. Raises
    `InputError` for a vocabulary without room for every byte and the end of a document.
    """
    if vocab_size < MIN_VOCAB:
        raise InputError(
            f"vocab-size: found {vocab_size}; at least {MIN_VOCAB} is required: 256 bytes and the end of a document"
        )
    tokenizers = _import()
    engine = tokenizers.Tokenizer(tokenizers.models.BPE())
    engine.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], show_progress=False,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    run_interruptibly(lambda text_iterator: engine.train_from_iterator(text_iterator, trainer), texts)
    return _tokenizer(engine, engine.to_str(pretty=True).encode("utf-8"), END_OF_DOCUMENT)


MAX_TOKENIZER_BYTES = 256_000_000  # those of the largest vocabularies have 35 MB


def load_tokenizer(path: str | Path, end_token: str | None = None) -> Tokenizer:
    """Load a tokenizer.json; `end_token` ends its documents, by default the first of `KNOWN_ENDS` that it has. Raises
    `InputError` for a file that is missing or no tokenizer, and for an end that the tokenizer does not have."""
    source = Path(path)
    text = read_bytes(source, FileMessages("tokenizer: ", "a tokenizer.json is required"), MAX_TOKENIZER_BYTES)
    return parse_tokenizer(text, str(source), end_token)


def parse_tokenizer(text: bytes, location: str, end_token: str | None = None) -> Tokenizer:
    """Parse the text of a tokenizer.json. Raises `InputError` as `load_tokenizer` does."""
    tokenizers = _import()
    try:
        parse_json(text, location)  # the library's own parser does not bound depth
        engine = tokenizers.Tokenizer.from_buffer(text)
    except Exception as error:  # the library raises plain `Exception` for what it cannot read
        raise InputError(f"tokenizer: {location} is not a tokenizer.json: {describe_error(error)}") from None
    vocab = engine.get_vocab(with_added_tokens=True)
    end = end_token if end_token is not None else next((token for token in KNOWN_ENDS if token in vocab), None)
    if end is None or end not in vocab:
        problem = f"{end!r} is not one of its tokens" if end else f"it has none of {', '.join(KNOWN_ENDS)}"
        raise InputError(
            f"tokenizer: {location}: {problem}; name the token that ends a document with --end-of-document TOKEN"
        )
    return _tokenizer(engine, text, end)


def _tokenizer(engine: Engine, text: bytes, end: str) -> Tokenizer:
    engine.no_truncation()  # a tokenizer.json may set either, which would cut or pad documents
    engine.no_padding()
    engine.encode_special_tokens = True  # a special token written in a text is plain text and ends no document
    return Tokenizer(engine=engine, text=text, end_token=end, end_id=engine.get_vocab(with_added_tokens=True)[end])


def _import() -> ModuleType:
    try:
        import tokenizers  # late, as it is an optional package
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise InputError('tokenize: the package tokenizers is not installed; pip install "shardwise[train]"') from None
    return tokenizers


Item = TypeVar("Item")


def run_interruptibly(work: Callable[[Iterator[Item]], object], items: Iterable[Item]) -> None:
    """Run `work` on the items in a thread of its own until it ends, or until Ctrl-C, which only the main thread
    receives.

    After Ctrl-C it gets no further item, and `KeyboardInterrupt` is raised as soon as it asks for one: what it then
    does outside Python ends with the process. Raises what the work raises.
    """
    stopped, finished = threading.Event(), threading.Event()
    problems: list[BaseException] = []

    def handed_over() -> Iterator[Item]:
        try:
            for item in items:
                if stopped.is_set():
                    return
                yield item
        finally:
            finished.set()

    def run() -> None:
        try:
            work(handed_over())
        except BaseException as error:
            problems.append(error)
        finally:
            finished.set()

    thread = threading.Thread(target=run, daemon=True)
    try:
        thread.start()  # inside `try`: after Ctrl-C during the start, the work would run on
        thread.join()
    except KeyboardInterrupt:
        stopped.set()
        if thread.is_alive():
            finished.wait()
        raise
    if problems:
        raise problems[0]
