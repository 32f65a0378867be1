"""Updates and surveys to compare implementations by: every rule and mode, over numbers that break arithmetic."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.adam_8bit import Adam8bitRule
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.grad_norm import BLOCK_NUMEL, LANES
from patrickstar._kernels.lion import LionRule
from patrickstar._kernels.rounding import canonical_nan_, rounded
from patrickstar._kernels.schedule_free import ScheduleFreeRule
from patrickstar._kernels.sgd import SGDRule
from patrickstar._kernels.split_masters import joined_masters, magnitudes, split_masters
from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar.testing import assert_same_bits

RULES = [
    AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, True, 3),
    AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, False, 1),
    AdamRule(0.3, 0.3, 0.5, 1e-8, 0.0, True, 2),
    AdamRule(1e-3, 0.0, 0.0, 1e-8, 0.0, False, 1),
    AdamRule(1e-42, 0.5, 0.95, 1e-41, 1e-40, False, 1000),
    SGDRule(0.1, 0.0, 0.0, 0.0, False, 1),
    SGDRule(0.1, 0.9, 0.0, 0.1, False, 1),
    SGDRule(0.1, 0.9, 0.1, 0.1, False, 2),
    SGDRule(0.1, 0.9, 0.0, 0.0, True, 1),
    SGDRule(1.0, 0.9, 0.0, 0.1, True, 5),
    LionRule(1e-3, 0.9, 0.99, 0.0),
    LionRule(1e-3, 0.9, 0.99, 0.1),
    ScheduleFreeRule(1e-2, 0.9, 0.95, 1e-8, 0.0, 1.0, 1),
    ScheduleFreeRule(1e-2, 0.9, 0.95, 1e-8, 0.1, 0.3, 4),
    ScheduleFreeRule(1e-2, 0.9, 0.95, 1e-8, 0.1, 0.7, 4),
    Adam8bitRule(1e-3, 0.9, 0.999, 1e-8, 0.01, True, 3),
    Adam8bitRule(0.3, 0.3, 0.5, 1e-8, 0.0, True, 90_000),
]
BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [
    # Elements, where they begin, whether gradients were summed before, scales. One program or several, full or not; at
    # addresses that allow wide loads and at others; two scales of which one leaves few digits.
    (0, 16, False, ()),
    (1, 3, True, (1.0,)),
    (48, 16, True, (0.5, 0.3)),
    (2500, 3, False, (1e-41, 3e38)),
    (2500, 16, True, ()),
    (3072, 16, False, (0.3, 1.7, 0.9)),
]

_SPECIAL = torch.tensor(
    [
        *(0.0, -0.0, 1e-45, -1e-40, 1e-38, 3e38, -3e38, float("inf"), -float("inf"), float("nan")),
        *(65504.0, 65520.0, 6e-8, 2.98e-8, 1.00390625, 1.01171875, -1.00390625),  # ends and ties of 16-bit floats
    ]
)
SCALES = (0.3, 0.5)
AROUND = 7.0
"""Memory content before and after the updated elements."""


def numbers(numel: int, dtype: torch.dtype, generator: torch.Generator, special: bool = True) -> torch.Tensor:
    """Numbers of all magnitudes, a quarter of them special ones if so wanted; any bytes."""
    if dtype == torch.uint8:
        return torch.randint(256, (numel,), dtype=dtype, generator=generator)
    normal = torch.randn(2, numel, generator=generator)
    values = normal[0] * torch.exp(6 * normal[1])
    if special:
        chosen = torch.rand(numel, generator=generator) < 0.25
        some = _SPECIAL[torch.randint(len(_SPECIAL), (numel,), generator=generator)]
        values = torch.where(chosen, some, values)
    return values.to(dtype)


def state_dtype(rule: Rule) -> torch.dtype:
    """Dtype of the states of a rule that has fp32 masters; an average has the master's all the same."""
    return torch.uint8 if isinstance(rule, Adam8bitRule) else torch.float32


@dataclass(frozen=True)
class Lists:
    """A parameter in its chunk lists: the chunk of each list and the offset of the parameter in it."""

    rule: Rule
    numel: int
    chunks: dict[str, torch.Tensor]
    firsts: dict[str, int]

    @classmethod
    def drawn(cls, rule, numel, *, grad=BF16, param=None, accumulated=False, firsts=(0,), seed=0, special=False):
        """Return random values. `param`: a dtype, or None to overwrite the gradient. `firsts`: offsets, cycled."""
        generator = torch.Generator().manual_seed(seed)
        dtypes = {"grad": grad, "param": param, "accumulated": FP32 if accumulated else None, "master": FP32}
        dtypes |= dict.fromkeys(rule.kinds, state_dtype(rule))
        chunks, starts = {}, {}
        for number, (name, dtype) in enumerate(dtypes.items()):
            if dtype is not None:
                first = starts[name] = firsts[number % len(firsts)]
                values = numbers(numel, dtype, generator) if special else torch.randn(numel, generator=generator)
                chunks[name] = torch.full((first + numel + 40,), AROUND, dtype=dtype)
                chunks[name][first : first + numel] = values.abs() if name == "exp_avg_sq" else values
        return cls(rule, numel, chunks, starts)

    def view(self, name):
        """Return the parameter's elements of a list, or None if the list does not exist."""
        return self.at(name, self.chunks)

    def at(self, name, chunks):
        """Return the parameter's elements of a list in other chunks."""
        first = self.firsts.get(name)
        return None if first is None else chunks[name][first : first + self.numel]

    def span(self):
        """Return the argument of a backend."""
        grad, param = self.view("grad"), self.view("param")
        states = tuple(self.view(kind) for kind in self.rule.kinds)
        gradient = Gradient(grad, self.view("accumulated"))
        master = self.view("master")
        upper = param if master.dtype == torch.int16 else None
        return Span(grad if param is None else param, gradient, master, states, self.rule, upper=upper)

    def copy(self, device="cpu"):
        """Return a copy with its own memory."""
        return replace(self, chunks={name: chunk.to(device, copy=True) for name, chunk in self.chunks.items()})

    def after(self, implementation, scales=SCALES, shard_bounds=(), elsewhere=0, device="cpu"):
        """Return the chunks after one update, split into spans at `shard_bounds`.

        Masters and states are written to other memory if `elsewhere` is not 0: so many elements further from a line.
        """
        lists = self.copy(device)
        span, names, new = lists.span(), ("master", *self.rule.kinds), {}
        if elsewhere:
            for name in names:
                chunk = self.chunks[name]
                new[name] = torch.full((len(chunk) + elsewhere,), AROUND, dtype=chunk.dtype)[elsewhere:]
            span = replace(span, out=tuple(replace(lists, chunks=new).view(name) for name in names))
        spans = [span.page(slice(*ends)) for ends in pairwise((0, *sorted(shard_bounds), self.numel))]
        implementation.update(spans, scales)
        for name in new:
            assert_same_bits([self.chunks[name]], [lists.chunks[name]], "old values")
        return lists.chunks | new

    def check(self, implementation, scales=SCALES, shard_bounds=(), elsewhere=(0, 1, 32), device="cpu"):
        """Compare with the eager backend on a single span in place, including the memory around the parameter."""
        expected = self.after(EagerBackend(), scales)
        for other in elsewhere:
            actual = self.after(implementation, scales, shard_bounds, other, device)
            case = f"{self.rule} over {self.numel} elements from {self.firsts}, cut at {shard_bounds}, to {other}"
            assert_same_bits(expected, actual, f"{case}, scaled by {scales}")


@dataclass(frozen=True)
class SplitLists:
    """A parameter whose master is split, and the same one with a whole master."""

    whole: Lists

    @classmethod
    def drawn(cls, rule, numel, **options):
        """Return random values, as `Lists.drawn`, with a parameter in bfloat16 that is the rounded master."""
        lists = Lists.drawn(rule, numel, param=BF16, **options)
        canonical_nan_(lists.chunks["master"])
        lists.view("param").copy_(rounded(lists.view("master"), BF16))
        return cls(lists)

    def split(self):
        """Return the lists with lower halves in place of masters, and marks of ties in the second moments."""
        chunks = {name: chunk.clone() for name, chunk in self.whole.chunks.items()}
        chunks["master"] = torch.full(chunks["master"].shape, int(AROUND), dtype=torch.int16)
        lists = replace(self.whole, chunks=chunks)
        names = ("param", "master", "exp_avg_sq")
        split_masters(self.whole.view("master"), self.whole.view("exp_avg_sq"), *map(lists.view, names))
        return lists

    def check(self, implementation, scales=SCALES, shard_bounds=(), elsewhere=(0, 1, 32), device="cpu"):
        """Compare with an update of whole masters, for an update in place and for others."""
        expected = self.whole.after(EagerBackend(), scales)
        for other in elsewhere:
            case = f"{self.whole.rule} over {self.whole.numel} elements from {self.whole.firsts} to {other}"
            chunks = self.split().after(implementation, scales, shard_bounds, other, device)
            chunks = {name: chunk.cpu() for name, chunk in chunks.items()}
            found = replace(self.whole, chunks=chunks)
            upper, lower, marked = found.view("param"), found.view("master"), found.view("exp_avg_sq")
            master, moments = joined_masters(upper, lower, marked), magnitudes(marked)
            marked.copy_(moments)
            assert_same_bits([self.whole.at("master", expected)], [master], case)
            for name in expected.keys() - {"master"}:
                assert_same_bits([expected[name]], [chunks[name]], f"{name} of {case}")
            first = self.whole.firsts["master"]
            around = torch.cat([chunks["master"][:first], chunks["master"][first + self.whole.numel :]])
            assert (around == int(AROUND)).all(), case


def check_split(implementation, rule: Rule, device: str = "cpu", cases=CASES, elsewhere=(0,)) -> None:
    """Compare an implementation's update of split masters with the list's of whole ones."""
    for seed, (numel, first, accumulated, scales) in enumerate(cases):
        options = dict(accumulated=accumulated, firsts=(first,), seed=seed, special=True)
        SplitLists.drawn(rule, numel, **options).check(implementation, scales, elsewhere=elsewhere, device=device)


STILL = AdamRule(0.0, 0.9, 0.999, 1e-8, 0.0, True, 1)
"""Changes no master if the gradient is zero."""


def check_all_masters(implementation, device: str = "cpu", first_bytes: Iterable[int] = range(256)) -> None:
    """Split all masters, and restore them by an update that changes nothing: 2^24 at a time, which begin with a byte.

    Args:
        first_bytes: First bytes of the masters, as numbers from 0 to 255.
    """
    for first_byte in first_bytes:
        first = first_byte << 24
        words = torch.arange(first, first + (1 << 24), dtype=torch.int64).to(torch.int32)
        masters = canonical_nan_(words.view(torch.float32))
        upper, zeros = torch.empty_like(masters, dtype=BF16), torch.zeros_like(masters)
        lower, marked = torch.empty_like(masters, dtype=torch.int16), torch.empty_like(masters)
        split_masters(masters, zeros, upper, lower, marked)
        assert_same_bits([masters], [joined_masters(upper, lower, marked)], f"masters from {first:#x}, joined")
        found = [each.to(device, copy=True) for each in (upper, lower, zeros, marked)]
        grad = torch.zeros_like(found[0])
        implementation.update(
            [Span(found[0], Gradient(grad), found[1], (found[2], found[3]), STILL, upper=found[0])], ()
        )
        finite = masters.isfinite()  # infinity less infinity is no number
        for before, after in zip((upper, lower, marked), (found[0], found[1], found[3]), strict=True):
            assert_same_bits([before[finite]], [after.cpu()[finite]], f"masters from {first:#x}, updated")


def check_update(implementation, rule: Rule, dtype: torch.dtype, device: str = "cpu", cases=CASES) -> None:
    """Compare an implementation's update with the list's, in place and into another dtype's memory."""
    for seed, (numel, first, accumulated, scales) in enumerate(cases):
        for param in (None, DTYPES[(DTYPES.index(dtype) + numel) % 3]):
            options = dict(grad=dtype, param=param, accumulated=accumulated, firsts=(first,), seed=seed)
            lists = Lists.drawn(rule, numel, special=True, **options)
            lists.check(implementation, scales, elsewhere=(0,), device=device)


def check_rounding(implementation, dtype: torch.dtype, device: str = "cpu", stride: int = 1) -> None:
    """Compare how masters are rounded: every upper half of a float32, or one of `stride`, with halves about ties."""
    lower = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
    upper = torch.arange(-(1 << 15), 1 << 15, stride, dtype=torch.int32)
    masters = (upper[:, None] * (1 << 16) + lower).flatten().view(torch.float32)
    results = []
    for one, place in ((implementation, device), (EagerBackend(), "cpu")):
        master = masters.to(place, copy=True)
        param = torch.zeros_like(master, dtype=dtype)
        still = SGDRule(0.0, 0.0, 0.0, 0.0, False, 1)  # adds a negative zero, which changes nothing
        one.update([Span(param, Gradient(torch.zeros_like(param)), master, (), still)], ())
        results.append((param, master))
    assert_same_bits(results[1], results[0], "parameter and master")


def check_survey(implementation, dtype: torch.dtype, device: str = "cpu", all_sizes: bool = True) -> None:
    """Compare sums of squares, which finite numbers of all magnitudes make depend on the order, and counts."""
    generator = torch.Generator().manual_seed(0)
    few = (0, 1, 33, BLOCK_NUMEL - 1, BLOCK_NUMEL)
    many = (*few, (LANES + 2) * BLOCK_NUMEL + 5)  # the blocks' sums are more than one row
    few = few if all_sizes else (0, 33, BLOCK_NUMEL)
    # Times infinity, what a last row lacks would be NaN.
    cases = ((many, False, False, (0.3, 1e-3)), (few, False, True, ()), (few, True, True, (0.5,)))
    for numels, special, earlier, scales in (*cases, ((33,), False, False, (float("inf"),))):
        lasts = [numbers(numel, dtype, generator, special) for numel in numels]
        sums = [numbers(numel, torch.float32, generator, special) if earlier else None for numel in numels]
        found = []
        for one, place in ((implementation, device), (EagerBackend(), "cpu")):
            gradients = [
                Gradient(last.to(place), None if summed is None else summed.to(place))
                for last, summed in zip(lasts, sums, strict=True)
            ]
            grad_stats = one.grad_stats(gradients, scales)
            found.append(([value.hex() for value in grad_stats.squares], grad_stats.not_finite))
        assert found[0] == found[1], (numels, special, earlier, scales)
