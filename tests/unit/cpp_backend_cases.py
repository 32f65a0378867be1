"""Parameters in chunk lists, and their update by a backend, for the tests of the C++ backend."""

from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.eager_backend import EagerBackend
from patrickstar._kernels.lion import LionRule
from patrickstar._kernels.sgd import SGDRule
from patrickstar._kernels.update_rule import Gradient, Rule, Span
from patrickstar.testing import assert_same_bits

BF16, FP16, FP32 = DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ADAM = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=3)
MOMENTUM = SGDRule(0.1, 0.9, 0.0, 0.01, nesterov=False, step=2)
PLAIN = SGDRule(0.1, 0.0, 0.0, 0.0, nesterov=False, step=1)
LION = LionRule(1e-3, 0.9, 0.99, 0.1)
AVERAGED = [
    AveragedRule(rule, weight) for rule in (ADAM, SGDRule(0.1, 0.9, 0.1, 0.1, False, 2)) for weight in (1.0, 0.001, 0.7)
]
RULES = [ADAM, MOMENTUM, PLAIN, LION, *AVERAGED]

STRIP, BLOCK, PIECE = 512, 4096, 1 << 14
"""Units of the C++ code in elements: inner loop, block of sums, work of a thread."""
SCALES = (0.3, 0.5)
AROUND = 7.0
"""Memory content before and after the updated elements."""


@dataclass(frozen=True)
class Lists:
    """A parameter in its chunk lists: the chunk of each list and the offset of the parameter in it."""

    rule: Rule
    numel: int
    chunks: dict[str, torch.Tensor]
    firsts: dict[str, int]

    @classmethod
    def drawn(cls, rule, numel, *, grad=BF16, param=None, accumulated=False, firsts=(0,), seed=0):
        """Return random values. `param`: a dtype, or None to overwrite the gradient. `firsts`: offsets, cycled."""
        generator = torch.Generator().manual_seed(seed)
        dtypes = {"grad": grad, "param": param, "accumulated": FP32 if accumulated else None, "master": FP32}
        dtypes |= dict.fromkeys(rule.kinds, FP32)
        chunks, starts = {}, {}
        for number, (name, dtype) in enumerate(dtypes.items()):
            if dtype is not None:
                first = starts[name] = firsts[number % len(firsts)]
                values = torch.randn(numel, generator=generator)
                chunks[name] = torch.full((first + numel + 40,), AROUND, dtype=dtype)
                chunks[name][first : first + numel] = values.abs() if name == "exp_avg_sq" else values
        return cls(rule, numel, chunks, starts)

    def view(self, name):
        """Return the parameter's elements of a list, or None if the list does not exist."""
        first = self.firsts.get(name)
        return None if first is None else self.chunks[name][first : first + self.numel]

    def span(self, rule=None):
        """Return the argument of a backend."""
        grad, param = self.view("grad"), self.view("param")
        states = tuple(self.view(kind) for kind in self.rule.kinds)
        gradient = Gradient(grad, self.view("accumulated"))
        return Span(grad if param is None else param, gradient, self.view("master"), states, rule or self.rule)

    def copy(self):
        """Return a copy with its own memory."""
        return replace(self, chunks={name: chunk.clone() for name, chunk in self.chunks.items()})

    def after(self, implementation, scales=SCALES, shard_bounds=(), elsewhere=0):
        """Return the chunks after one update, split into spans at `shard_bounds`.

        Masters and states are written to other memory if `elsewhere` is not 0: so many elements further from a line.
        """
        lists = self.copy()
        span = lists.span()
        if elsewhere:
            names = ("master", *self.rule.kinds)
            new = {name: torch.full((len(self.chunks[name]) + elsewhere,), AROUND)[elsewhere:] for name in names}
            out = replace(lists, chunks=new)
            span = replace(span, out=tuple(out.view(name) for name in names))
        spans = [span.page(slice(*ends)) for ends in pairwise((0, *sorted(shard_bounds), self.numel))]
        implementation.update(spans, scales)
        if not elsewhere:
            return lists.chunks
        assert_same_bits([self.chunks[name] for name in names], [lists.chunks[name] for name in names], "old values")
        return lists.chunks | new

    def check(self, implementation, scales=SCALES, shard_bounds=()):
        """Compare with the eager backend on a single span in place, including the memory around the parameter."""
        expected = self.after(EagerBackend(), scales)
        for elsewhere in (0, 1, 32):
            actual = self.after(implementation, scales, shard_bounds, elsewhere)
            case = f"{self.rule} over {self.numel} elements from {self.firsts}, cut at {shard_bounds}, to {elsewhere}"
            assert_same_bits(expected, actual, case)
