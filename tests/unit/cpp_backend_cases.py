"""Rules and units of the tests of the C++ backend."""

from patrickstar._kernels.adam import AdamRule
from patrickstar._kernels.averaged import AveragedRule
from patrickstar._kernels.lion import LionRule
from patrickstar._kernels.sgd import SGDRule

ADAM = AdamRule(1e-3, 0.9, 0.999, 1e-8, 0.01, decoupled=True, step=3)
MOMENTUM = SGDRule(0.1, 0.9, 0.0, 0.01, nesterov=False, step=2)
PLAIN = SGDRule(0.1, 0.0, 0.0, 0.0, nesterov=False, step=1)
LION = LionRule(1e-3, 0.9, 0.99, 0.1)
DAMPED = SGDRule(0.1, 0.9, 0.1, 0.1, nesterov=False, step=2)
AVERAGED = [AveragedRule(rule, weight) for rule in (ADAM, DAMPED) for weight in (1.0, 0.001, 0.7)]
RULES = [ADAM, MOMENTUM, PLAIN, LION, *AVERAGED]

STRIP, BLOCK, PIECE = 512, 4096, 1 << 14
"""Units of the C++ code in elements: inner loop, block of sums, work of a thread."""
