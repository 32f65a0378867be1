"""Adapters of a plan: low-rank matrices that are trained beside a frozen base."""

from dataclasses import dataclass

from patrickstar.errors import ConfigError


@dataclass(frozen=True)
class Adapters:
    """Adapters beside all linear layers but the head.

    Attributes:
        rank: Number of columns of the first matrix, and of rows of the second.
        quantized: The base's linear layers but the head are stored in 4 bits (QLoRA).
    """

    rank: int
    quantized: bool = False

    def __str__(self) -> str:
        return f"{'QLoRA' if self.quantized else 'LoRA'} of rank {self.rank}"


def adapters_of(lora: int | None, qlora: int | None) -> Adapters | None:
    """Return the adapters of a rank of LoRA or of QLoRA; None if neither is given.

    Raises:
        ConfigError: Both are given, or a rank is not positive.
    """
    if lora is not None and qlora is not None:
        raise ConfigError(f"--lora {lora} and --qlora {qlora} exclude each other: both are adapters")
    for name, rank in (("lora", lora), ("qlora", qlora)):
        if rank is not None:
            if rank < 1:
                raise ConfigError(f"--{name} {rank}: the rank has to be at least 1")
            return Adapters(rank, quantized=name == "qlora")
    return None
