"""Span corruption: what encoder and decoder read is the text, with spans in their order and each token once."""

import random

import pytest
import torch

from patrickstar._models.span_corruption import NOISE_SHARE, SENTINELS, SpanCorruption

VOCAB, END = 1000 + SENTINELS, 0


def restored(inputs: list[int], labels: list[int]) -> list[int]:
    """Return the text that a pair of sequences comes from."""
    assert inputs.pop() == labels.pop() == END
    spans: dict[int, list[int]] = {}
    for token in labels:
        if token >= VOCAB - SENTINELS:
            spans[token] = last = []
        else:
            last.append(token)
    assert list(spans) == [token for token in inputs if token >= VOCAB - SENTINELS]
    assert list(spans) == [VOCAB - 1 - number for number in range(len(spans))]
    assert all(spans.values()), "a span is empty"
    return [each for token in inputs for each in spans.get(token, [token])]


@pytest.mark.parametrize("sequence", [2, 3, 4, 7, 20, 100, 512, 2000])
def test_nothing_is_lost(sequence):
    task, draw = SpanCorruption(VOCAB, END), random.Random(sequence)
    ids = torch.tensor([[draw.randrange(1, 1000) for _ in range(sequence)] for _ in range(4)])
    batch = task.corrupt(ids, 3, 7)
    noise, spans = task.spans(sequence)
    lengths = sequence - noise + spans + 1, noise + spans + 1
    assert tuple(each.shape[1] for each in batch.values()) == lengths
    assert spans <= SENTINELS and abs(noise - NOISE_SHARE * sequence) <= 1
    for row, inputs, labels in zip(ids.tolist(), batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True):
        assert restored(inputs, labels) == row


def test_the_seed_decides():
    task, ids = SpanCorruption(VOCAB, END), torch.arange(1, 65).reshape(1, 64)
    first, again, other = (task.corrupt(ids, *seed)["labels"].tolist() for seed in ((1, 2), (1, 2), (1, 3)))
    assert first == again != other
