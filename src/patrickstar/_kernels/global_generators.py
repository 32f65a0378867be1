"""State of the global random generators."""

import random

import numpy as np
import torch


class GlobalGenerators:
    """State of the global random generators when it was created."""

    def __init__(self) -> None:
        self._torch, self._python, self._numpy = torch.get_rng_state(), random.getstate(), np.random.get_state()

    @property
    def used(self) -> bool:
        """True if a generator has been used since."""
        return not (
            torch.equal(self._torch, torch.get_rng_state())
            and self._python == random.getstate()
            and all(np.array_equal(*pair) for pair in zip(self._numpy, np.random.get_state(), strict=True))
        )

    def restore(self) -> None:
        """Return to that state."""
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
