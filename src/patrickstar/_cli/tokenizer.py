"""Token ids of a text by a byte-level byte-pair tokenizer, which is trained once per text and cached."""

import hashlib
import os
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from tempfile import mkstemp

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers import __version__ as tokenizers_version

from patrickstar._cli.corpus import Corpus
from patrickstar._hardware.cpu_allocator import cache_folder
from patrickstar._models.vocabulary import SMALLEST_VOCABULARY, Vocabulary, read_tokenizer
from patrickstar.errors import ConfigError, DataError, ModelError

END_TOKEN = "<|endoftext|>"
# Part of every cache key: increase it if the same text should be encoded differently.
_CACHE_VERSION = 1
# Documents encoded together: enough to use all cores, few enough to limit the memory of the encodings.
_DOCUMENTS_AT_ONCE = 64


def load_tokens(corpus: Corpus, vocabulary: Vocabulary) -> NDArray[np.unsignedinteger]:
    """Return the corpus as a memory-mapped stream of token ids, with the end marker after each document.

    Raises:
        DataError: The cache folder cannot be used.
        ConfigError, ModelError: The vocabulary cannot be used.
    """
    stem = _cache_stem(corpus, vocabulary)
    stream = stem.with_suffix(".npy")
    if not stream.exists():
        tokenizer = _tokenizer(corpus, vocabulary, stem.with_suffix(".tokenizer.json"))
        tokens = _encode(tokenizer, corpus, vocabulary)
        _write_atomically(stream, lambda path: _save(path, tokens))
    try:
        cached: NDArray[np.unsignedinteger] = np.load(stream, mmap_mode="r")
    except (OSError, ValueError) as error:
        raise DataError(f"the cached tokens {stream} can't be read ({error}); delete the file") from error
    return cached


def tokenizer_text(corpus: Corpus, vocabulary: Vocabulary) -> str:
    """Return the tokenizer of `load_tokens` as JSON of the tokenizers library."""
    return _tokenizer(corpus, vocabulary, _cache_stem(corpus, vocabulary).with_suffix(".tokenizer.json")).to_str()


def train_tokenizer(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """Train a byte-level byte-pair tokenizer of ``vocab_size`` tokens, or fewer if the text has fewer pairs.

    Raises:
        ConfigError: The size is too small for all bytes.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ConfigError(
            f"a vocabulary of {vocab_size} can't hold the 256 bytes and the end marker; "
            f"use {SMALLEST_VOCABULARY} or more"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus.texts(), trainer)
    return tokenizer


def _cache_stem(corpus: Corpus, vocabulary: Vocabulary) -> Path:
    """Return the path, without suffix, of the cache files of a text and a vocabulary."""
    parts = f"{_CACHE_VERSION} {tokenizers_version} {vocabulary.key()} {corpus.digest()}"
    return cache_folder() / hashlib.sha256(parts.encode()).hexdigest()[:32]


def _tokenizer(corpus: Corpus, vocabulary: Vocabulary, cached: Path) -> Tokenizer:
    if vocabulary.file is None:
        if cached.exists():
            try:
                return Tokenizer.from_file(str(cached))
            except Exception as error:  # the library raises bare Exceptions
                raise DataError(f"the cached tokenizer {cached} can't be read ({error}); delete the file") from error
        tokenizer = train_tokenizer(corpus, vocabulary.size)
        _write_atomically(cached, lambda path: tokenizer.save(str(path)))
        return tokenizer
    try:
        given: Tokenizer = Tokenizer.from_buffer(read_tokenizer(vocabulary.file))
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"the tokenizer {vocabulary.file} can't be read: {error}") from error
    if given.get_vocab_size() > vocabulary.size:
        raise ModelError(
            f"the tokenizer {vocabulary.file} has {given.get_vocab_size()} tokens and the model only {vocabulary.size}"
        )
    return given


def _encode(tokenizer: Tokenizer, corpus: Corpus, vocabulary: Vocabulary) -> NDArray[np.unsignedinteger]:
    dtype = np.uint16 if vocabulary.size <= 2**16 else np.uint32
    end = [] if vocabulary.end_id is None else [vocabulary.end_id]
    pieces: list[NDArray[np.unsignedinteger]] = []
    for documents in _batched(corpus.texts(), _DOCUMENTS_AT_ONCE):
        for encoding in tokenizer.encode_batch_fast(documents, add_special_tokens=False):
            pieces.append(np.asarray([*encoding.ids, *end], dtype))
    return np.concatenate(pieces)


def _batched(texts: Iterator[str], count: int) -> Iterator[list[str]]:
    while batch := list(islice(texts, count)):
        yield batch


def _save(path: Path, tokens: NDArray[np.unsignedinteger]) -> None:
    with path.open("wb") as file:
        np.save(file, tokens)


def _write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a temporary file and rename it to ``path``, so that an incomplete file is never visible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = mkstemp(dir=path.parent, prefix=path.name)
        os.close(descriptor)
        try:
            write(Path(name))
            os.replace(name, path)
        finally:
            Path(name).unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {path.parent} can't be written ({error.strerror}); set XDG_CACHE_HOME to one that can"
        ) from error
