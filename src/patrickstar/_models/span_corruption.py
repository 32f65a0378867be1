"""Span corruption: the training task of models with encoder and decoder (Raffel et al. 2020, section 3.1.4)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

NOISE_SHARE = 0.15
"""Share of the tokens that are removed."""
SPAN_TOKENS = 3
"""Mean length of the removed spans."""
SENTINELS = 100
"""Tokens at the end of the vocabulary that stand for spans, the last one for the first span."""
MOST_TOKENS = round(SENTINELS * SPAN_TOKENS / NOISE_SHARE)
"""Length of the longest sequence for whose spans there are sentinels."""


_Row = NDArray[np.int64]


@dataclass(frozen=True)
class SpanCorruption:
    """Removes spans of a text: the encoder reads the rest, the decoder writes the spans.

    Args:
        vocab_size: Number of tokens, with sentinels.
        end_id: Token after both.
    """

    vocab_size: int
    end_id: int

    @staticmethod
    def spans(sequence: int) -> tuple[int, int]:
        """Return how many tokens and spans are removed from a sequence; at least one of each, and not all tokens."""
        noise = min(max(1, round(sequence * NOISE_SHARE)), sequence - 1)
        return noise, min(max(1, round(noise / SPAN_TOKENS)), sequence - noise)

    def corrupt(self, ids: torch.Tensor, *seed: int) -> dict[str, torch.Tensor]:
        """Return inputs and labels of a batch, whose spans are drawn from the seed; their shapes are not.

        Args:
            ids: Token ids, (batch, sequence).
            seed: Numbers that together belong to this batch alone.
        """
        draw = np.random.default_rng(seed)
        rows = [self._corrupt(row, draw) for row in ids.numpy()]
        inputs, labels = (torch.from_numpy(np.stack(side)) for side in zip(*rows, strict=True))
        return {"input_ids": inputs, "labels": labels}

    def _corrupt(self, row: _Row, draw: np.random.Generator) -> tuple[_Row, _Row]:
        noise, spans = self.spans(len(row))
        removed, remaining = _split(noise, spans, draw), _split(len(row) - noise, spans, draw)
        inputs: list[_Row] = []
        labels: list[_Row] = []
        start = 0
        for number, (left_tokens, removed_tokens) in enumerate(zip(remaining, removed, strict=True), start=1):
            sentinel = np.array([self.vocab_size - number], dtype=np.int64)
            middle = start + left_tokens
            inputs += [row[start:middle], sentinel]
            labels += [sentinel, row[middle : middle + removed_tokens]]
            start = middle + removed_tokens
        end = np.array([self.end_id], dtype=np.int64)
        return np.concatenate([*inputs, end]), np.concatenate([*labels, end])


def _split(total: int, parts: int, draw: np.random.Generator) -> list[int]:
    """Return `parts` positive numbers that add up to `total`, each division of it as likely."""
    ends = np.sort(draw.choice(total - 1, parts - 1, replace=False)) + 1
    lengths: list[int] = np.diff([0, *ends, total]).tolist()
    return lengths
