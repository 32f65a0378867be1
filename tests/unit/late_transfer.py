"""Transfer of tests that ends when it is waited for."""

from collections.abc import Callable

from patrickstar._hardware.transfer import CompletedTransfer


class LateTransfer(CompletedTransfer):
    """Transfer that runs when it is waited for, and counts its waits."""

    def __init__(self, label: str, run: Callable[[], object] = lambda: None) -> None:
        super().__init__(label)
        self._run, self.waits = run, 0

    @property
    def done(self) -> bool:
        return self.waits > 0

    def wait(self) -> None:
        if not self.done:
            self._run()
        self.waits += 1
