"""Autograd modes in which the engine works on parameters."""

from types import TracebackType

import torch


class managing:
    """Context without gradients and inference mode, since tensors created in it outlive the user's mode.

    A class, and not `torch.no_grad`: it is entered at every operator.
    """

    __slots__ = ("_grad", "_inference")

    def __enter__(self) -> None:
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
