"""AdamW with states of 8 bits."""

from collections.abc import Mapping
from typing import Any

from patrickstar._kernels.adam_8bit import Adam8bitRule
from patrickstar._layout.schema import EXP_AVG_8BIT, EXP_AVG_SQ_8BIT
from patrickstar.optim.adam import AdamW


class AdamW8bit(AdamW):
    """AdamW whose two states have 8 bits each: 8 bytes of model data per parameter in place of 14.

    This is another algorithm than AdamW: it rounds its states to 256 values after each update, up or down at random,
    and the parameters differ from those of AdamW. Its own results are the same bits under any budget and for any number
    of processes. The states are codes of each element alone, unlike those of bitsandbytes, which have a scale for each
    block (see docs/update.md).
    """

    @property
    def state_dtypes(self) -> dict[str, str]:
        """Dtypes of the states: one byte per element."""
        return dict.fromkeys((EXP_AVG_8BIT, EXP_AVG_SQ_8BIT), "uint8")

    def rule(self, group: Mapping[str, Any], step: int, memory: dict[str, Any]) -> Adam8bitRule:
        """Return the rule of one update; see `Optimizer.rule`."""
        return Adam8bitRule(**vars(super().rule(group, step, memory)))
