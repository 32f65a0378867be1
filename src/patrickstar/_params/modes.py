"""Context in which the engine works on parameters."""

from threading import get_ident
from types import TracebackType

import torch

from patrickstar._hardware.sigint_gate import ABSENT, GATE, LOCKED, SHUT, deferring_sigint


class managing(deferring_sigint):
    """Context without gradients and inference mode, since tensors created in it outlive the user's mode.

    Ctrl-C takes effect at its end. A class, and not `torch.no_grad`: it is entered at every operator, and so does by
    itself what the methods of its superclass do.
    """

    __slots__ = ("_grad", "_inference")

    def __enter__(self) -> None:
        if GATE.thread == get_ident():
            self._before = GATE.position
            if self._before != LOCKED:
                GATE.position = SHUT
        else:
            super().__enter__()
        self._inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
        if self._inference is not None:
            self._inference.__enter__()
        self._grad = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        torch._C._set_grad_enabled(self._grad)
        if self._inference is not None:
            self._inference.__exit__(kind, error, trace)
        if self._before is not None and self._before != ABSENT:
            GATE.position = self._before
            if GATE.deferred is None:
                return
        super().__exit__(kind, error, trace)
