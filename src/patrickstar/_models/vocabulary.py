"""Vocabulary of a language model: trained on a text, or of a tokenizer file."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from patrickstar.errors import ModelError

# 256 byte tokens, so that any text can be encoded, and the end marker.
SMALLEST_VOCABULARY = 257


@dataclass(frozen=True)
class Vocabulary:
    """Vocabulary of ``size`` tokens, trained on the text unless a ``tokenizer.json`` is given as ``file``.

    ``end_id`` follows every document; a trained vocabulary begins with it.
    """

    size: int
    file: Path | None = None
    end_id: int | None = 0

    def key(self) -> str:
        """Return a key that is equal for vocabularies that encode every text equally."""
        origin = "trained" if self.file is None else hashlib.sha256(read_tokenizer(self.file)).hexdigest()
        return f"{self.size} {origin} {self.end_id}"


def read_tokenizer(file: Path) -> bytes:
    """Return the bytes of a tokenizer file. Raise ModelError if it can't be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ModelError(f"the tokenizer {file} can't be read: {error.strerror}") from error
