"""Partition of all processes into groups whose gradients of a parameter are added."""

from collections.abc import Collection, Hashable, Sequence

# [Note: which gradients are added]
# Processes that hold the same part of a parameter add their gradients, and the sum is always divided by the number of
# distinct batches. A gradient may already contain those of other batches: an expert that is shared out over processes
# receives the tokens of all of them, and the all-to-all's backward brings their gradients. So each process accounts for
# the batches of all processes of its DTensor's mesh. A group is complete if its members account for each batch once.
# With tensor parallelism a replicated parameter is held by processes that compute the same batch; they form one group
# for each of them, which compute the same sum.


def partition_processes(
    parts: Sequence[Hashable], batches: Sequence[Collection[int]], batch_count: int
) -> tuple[tuple[int, ...], ...] | None:
    """Divide all processes into groups that hold the same part of a parameter and account for each batch once.

    Args:
        parts: Part of the parameter that each process holds.
        batches: Numbers of the batches that its gradient contains, by process.
        batch_count: Number of distinct batches.

    Returns:
        Ranks of each group, ascending; None if a group would miss or repeat a batch.
    """
    groups: list[tuple[Hashable, list[int], set[int]]] = []
    for rank, (part, own) in enumerate(zip(parts, batches, strict=True)):
        for held, ranks, seen in groups:
            if held == part and not seen & set(own):
                ranks.append(rank)
                seen.update(own)
                break
        else:
            groups.append((part, [rank], set(own)))
    if any(len(seen) != batch_count for _, _, seen in groups) or len({len(ranks) for _, ranks, _ in groups}) != 1:
        return None
    return tuple(tuple(ranks) for _, ranks, _ in groups)
