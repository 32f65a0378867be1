"""Addresses of parameters, which kernels that Python starts ask for."""

from collections.abc import Sequence
from typing import Any

import torch

from patrickstar._hardware.sigint_gate import managing
from patrickstar._params.managed_param import ManagedParam

# [Note: addresses of parameters]
# Kernels that are started from Python (Triton's, those of ctypes and numba) ask a tensor for its address. Who asks may
# also only compare addresses, to find tied weights; the two can't be told apart. So an address is that of values which
# are on the device, and they stay there until the next operator on a parameter: a kernel gets all its addresses before
# it is started, and later evictions are ordered behind it as behind an operator. Addresses that are taken together are
# fetched together, and it is a BudgetError if they don't fit. A kernel in a custom Function reads saved parameters in
# its backward by the same rule.


def hold_for_address(interceptor: Any, managed_params: Sequence[ManagedParam]) -> None:
    """Fetch parameters whose address is taken, and keep them on the device until the next operator.

    See [Note: addresses of parameters].
    """
    data = interceptor.data
    for managed in managed_params:
        if managed.on_host:
            data.move_embedding_to_device(managed)
    belongs = torch.is_grad_enabled() or interceptor.in_backward
    interceptor.note(managed_params)
    if not interceptor.covers(managed_params):
        interceptor.addressed = tuple(dict.fromkeys((*interceptor.addressed, *managed_params)))
        with managing():
            data.access(interceptor.addressed, belongs, gently=interceptor.in_backward)
            interceptor.end_uses(interceptor.addressed)
