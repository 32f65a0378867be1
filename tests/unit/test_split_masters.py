"""Split masters: a parameter in bfloat16 and 16 further bits give back every master, and updates have the same bits."""

from dataclasses import replace

import implementations
import pytest
import torch
from kernel_cases import RULES, SCALES, SplitLists, check_all_masters, check_split
from sampling import nightly

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.rounding import rounded
from patrickstar._kernels.split_masters import joined_masters, magnitudes, split_masters
from patrickstar._kernels.update_rule import joined
from patrickstar.testing import assert_same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

ADAM = [rule for rule in RULES if type(rule) is AdamRule]


def of_words(*words):
    """Return fp32 numbers of these bits."""
    return torch.tensor(words, dtype=torch.int64).to(torch.int32).view(torch.float32)


def words_of(values):
    return [int(word) & 0xFFFFFFFF for word in values.view(torch.int32)]


def split(masters, moments):
    upper, lower = torch.empty_like(masters, dtype=torch.bfloat16), torch.empty_like(masters, dtype=torch.int16)
    marked = torch.empty_like(masters)
    split_masters(masters, moments, upper, lower, marked)
    return upper, lower, marked


def test_the_example_of_the_note():
    masters = of_words(0x3F7F8001, 0x3F7F8000, 0x3F808000)
    upper, lower, marked = split(masters, torch.zeros(3))
    assert [int(word) & 0xFFFF for word in upper.view(torch.int16)] == [0x3F80] * 3
    assert [int(word) & 0xFFFF for word in lower] == [0x8001, 0x8000, 0x8000]
    assert words_of(marked) == [0, 0x80000000, 0]
    assert words_of(joined_masters(upper, lower, marked)) == words_of(masters)


def test_every_upper_half_with_lower_halves_about_a_tie():
    lower = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    upper = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    masters = ((upper[:, None] << 16) | lower).flatten().view(torch.float32)
    masters = torch.where(masters.isnan(), torch.nan, masters)
    moments = torch.rand(masters.shape, generator=torch.Generator().manual_seed(0))
    moments[::7], moments[1::7] = torch.nan, torch.inf
    found = split(masters, moments)
    assert words_of(found[0].float()) == words_of(rounded(masters, torch.bfloat16).float())
    assert words_of(joined_masters(*found)) == words_of(masters)
    assert words_of(magnitudes(found[2])) == words_of(moments)
    marks = (found[2].view(torch.int32) < 0).sum()
    assert marks == (1 << 15) - 2 * 64  # odd upper halves, those of NaN aside


def test_one_random_master_in_131072_is_marked():
    words = torch.randint(-(1 << 31), 1 << 31, (1 << 22,), generator=torch.Generator().manual_seed(0))
    masters = words.to(torch.int32).view(torch.float32)
    masters = torch.where(masters.isnan(), torch.nan, masters)
    marks = int((split(masters, torch.zeros_like(masters))[2].view(torch.int32) < 0).sum())
    assert 16 < marks < 64, marks  # 32 are expected


@pytest.mark.parametrize("implementation", implementations.ALL)
@pytest.mark.parametrize("rule", [*ADAM, AveragedRule(ADAM[0], 0.3)], ids=lambda rule: f"{type(rule).__name__}")
def test_updates_are_those_of_whole_masters(rule, implementation):
    check_split(implementation, rule, elsewhere=(0, 1, 32))


@pytest.mark.parametrize("implementation", implementations.ALL)
def test_any_size_cut_anywhere(implementation):
    for number, numel in enumerate([1, 15, 33, 511, 513, 4097, (1 << 14) + 3]):
        lists = SplitLists.drawn(ADAM[0], numel, firsts=(number, 3, 16), special=True, seed=number)
        lists.check(implementation, shard_bounds=sorted({numel // 3, numel // 2}))


def test_neighbours_are_joined():
    """With the parameters, of which masters are restored."""
    lists = SplitLists.drawn(ADAM[0], 64).split()
    parts = [lists.span().page(slice(first, first + 32)) for first in (0, 32)]
    (whole,) = joined(parts)
    assert whole.upper.data_ptr() == lists.view("param").data_ptr() and whole.upper.numel() == 64


@pytest.mark.parametrize("implementation", implementations.ALL)
def test_parameters_in_other_memory(implementation):
    """The old ones are read, and the new ones go elsewhere, as to the host copy of a chunk on the device."""
    lists = SplitLists.drawn(ADAM[0], 1000, special=True)
    expected = lists.whole.at("param", lists.whole.after(EagerBackend()))
    one = lists.split()
    old, new = one.view("param").clone(), torch.zeros(1000, dtype=torch.bfloat16)
    implementation.update([replace(one.span(), param=new, upper=old)], SCALES)
    assert_same_bits([expected], [new], "parameters")


@pytest.mark.parametrize("implementation", implementations.ALL)
def test_all_masters(implementation):
    """In every run those from a half to two, and all 2^32 at night."""
    check_all_masters(implementation, first_bytes=range(256) if nightly() else [0x3F])
