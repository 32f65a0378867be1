"""Part of a device budget that the fragmentation of the caching allocator needs."""

from dataclasses import dataclass

# [Note: reserved memory]
# The caching allocator takes memory from the device in pages of 2 MiB for small blocks and of 20 MiB for others, and
# gives a page back only if no block is on it. So it reserves more than it has allocated. What it reserves is what other
# programs can't use, hence what a budget has to bound. It can be limited: at the limit the allocator waits for the
# device, gives back what is cached, and if that does not suffice is out of memory. A step in which this happens often
# is slow.
#
# So a budget has a part that is planned, for chunks and non-model data, and a part that is left to fragmentation; and
# the allocator is limited to the whole. The pages that are used in part are as many for a small budget as for a large
# one: where the share of the budget is smaller than they are, the budget is planned whole, and what is reserved may
# exceed it by these pages.

PERCENT = 8
"""Part of a budget that is left to fragmentation. With a 3B model within 24 GiB, an H200 reserved 27.8 GB at a peak of
25.5 GB that were allocated: 8 % of them were free."""
MIB = 1 << 20


@dataclass(frozen=True)
class Fragmentation:
    """Fragmentation of a caching allocator with expandable segments.

    Args:
        small_bytes: Largest block of its pool of small blocks, 1 MiB in PyTorch; the sizes of pages follow. 0: the
            allocator can't be limited, and nothing is left to fragmentation.
    """

    small_bytes: int = MIB

    @property
    def page_bytes(self) -> int:
        """Bytes of the pages that may be used in part: three of the large pool, and two of the small one."""
        return (3 * 20 + 2 * 2) * self.small_bytes

    @property
    def overshoot_bytes(self) -> int:
        """Bytes by which the allocator exceeds its limit: it compares a block, and then takes whole pages for it."""
        return (20 - 2) * self.small_bytes

    def planned_bytes(self, budget_bytes: int) -> int:
        """Return the part of a budget for chunks and non-model data; a larger budget has no smaller one."""
        if not self.small_bytes:
            return budget_bytes
        whole = self.page_bytes * (100 - PERCENT) // PERCENT
        return min(budget_bytes, max(whole, budget_bytes * (100 - PERCENT) // 100))

    def unplanned_bytes(self, budget_bytes: int) -> int:
        """Return the part of a budget that is left to fragmentation."""
        return budget_bytes - self.planned_bytes(budget_bytes)

    def reserved_limit_bytes(self, budget_bytes: int) -> int:
        """Return the most that is reserved: the budget, or for a small one what is planned and the pages."""
        return max(budget_bytes, self.planned_bytes(budget_bytes) + self.page_bytes)

    def budget_bytes(self, planned_bytes: int) -> int:
        """Return the smallest budget of which this much is planned."""
        if self.planned_bytes(planned_bytes) >= planned_bytes:
            return planned_bytes
        budget = planned_bytes * 100 // (100 - PERCENT)
        while self.planned_bytes(budget) < planned_bytes:
            budget += 1
        return budget


NO_FRAGMENTATION = Fragmentation(0)
