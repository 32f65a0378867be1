"""Options of steps that compute by tiles of tokens."""

from typing import NamedTuple


class Tiling(NamedTuple):
    """Values of the options `tiled_loss` and `tiled_mlp` of a configuration."""

    tiled_loss: bool = False
    tiled_mlp: bool = False

    def __str__(self) -> str:
        return " and ".join(f"{name}=True" for name, value in self._asdict().items() if value)


NOT_TILED = Tiling()
