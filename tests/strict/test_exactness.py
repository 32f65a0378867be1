"""Law 1 on the strict device: for any schedule, model, loop and budget the bits are those of plain PyTorch there."""

from functools import cache, partial

import pytest
import strict_device
import torch
import toys
from laws.test_late_copies import run_drawn, some_are_slow
from torch import nn

import patrickstar as ps


@cache
def batches(count: int, length: int = 5) -> list[tuple[torch.Tensor]]:
    """Return the batches of `toys.batches` on the device."""
    return [(ids.to("strict"),) for (ids,) in toys.batches(count, length)]


def run_schedule(seed: int, directory) -> bool:
    """Train a random model in a random loop with random budgets; return False if the budgets are too small."""
    strict_device.configure()
    begin = lambda: strict_device.configure(seed=seed) or {}  # noqa: E731
    return run_drawn(seed, directory, begin, batches, device="strict", host_memory=1 << 22) is not None


@pytest.mark.parametrize("seeds", some_are_slow(200, fast=3))
def test_no_schedule_changes_results(seeds, tmp_path):
    ran = [run_schedule(seed, tmp_path) for seed in seeds]
    assert sum(ran) > len(seeds) // 2, f"only {sum(ran)} of {seeds} ran"


class WordsThatAreRead(nn.Module):
    """Model that reads the weight of its embedding after the lookup, too: not in the first forwards."""

    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(4000, 64), nn.Linear(64, 8)
        self.padding_idx, self.forwards = padding_idx, 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        out = self.body(nn.functional.embedding(ids, self.words.weight, self.padding_idx))
        return out + self.words.weight[:3].sum() if self.forwards in (3, 5) else out


@pytest.mark.parametrize("padding_idx", [None, 7, -3990])
@pytest.mark.parametrize("device_memory", ["600KiB", "2MiB"])
def test_an_embedding_may_come_to_the_device_after_a_lookup_on_the_host(padding_idx, device_memory):
    strict_device.configure()
    ids = torch.randint(0, 20, (6, 4, 8), generator=torch.Generator().manual_seed(3))
    config = ps.Config(device="strict", chunk_size=4096, precision="bf16", device_memory=device_memory)
    ps.testing.assert_exact(partial(WordsThatAreRead, padding_idx), [(batch,) for batch in ids], config, stress=False)


class TiedWords(nn.Module):
    """Model whose head has the weight of its embedding, beside layers that take turns with it on the device."""

    def __init__(self, lookups: int) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(2000, 64, padding_idx=7), toys.layers(64, 6, nn.Tanh)
        self.head = nn.Linear(64, 2000, bias=False)
        self.head.weight, self.lookups = self.words.weight, lookups

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = sum(self.body(self.words(ids + number)) for number in range(self.lookups))
        return self.head(hidden).float().square().mean()


@pytest.mark.parametrize("lookups", [1, 2])
@pytest.mark.parametrize("device_memory", ["900KiB", "4MiB"])
def test_a_tied_embedding_is_looked_up_on_the_host(lookups, device_memory):
    strict_device.configure()
    ids = torch.randint(0, 20, (6, 4, 8), generator=torch.Generator().manual_seed(3))
    config = ps.Config(device="strict", chunk_size=4096, precision="bf16", device_memory=device_memory)
    ps.testing.assert_exact(partial(TiedWords, lookups), [(batch,) for batch in ids], config)
