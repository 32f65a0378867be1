"""Tiers of each chunk over a step, as a map of chunks by times."""

from dataclasses import dataclass

from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import StepTimeline

PLACES = ("disk, or other processes", "host", "device and host", "device", "device, gradients")
"""Places of a chunk by number."""
NOWHERE, ON_HOST, ON_BOTH, ON_DEVICE, WITH_GRADIENTS = range(len(PLACES))

COLUMNS = 400
"""Number of times of a map: more than a picture has columns for."""


@dataclass(frozen=True)
class ResidencyMap:
    """Places of chunks, by chunk and time in seconds since the step's start."""

    chunks: list[int]
    times: list[float]
    places: list[list[int]]


def residency_map(timeline: StepTimeline, kind: str) -> ResidencyMap:
    """Return where the chunks of a list were at times that divide the step evenly."""
    on: dict[Tier, set[int]] = {tier: set() for tier in Tier}
    for each in timeline.initial:
        if each.kind == kind:
            on[each.tier].add(each.index)
    chunks = sorted({each.index for each in (*timeline.initial, *timeline.residency) if each.kind == kind})
    gradients: set[int] = set()
    changes = [(each.at_s, on[each.tier], each.index, each.present) for each in timeline.residency if each.kind == kind]
    changes += [(at_s, gradients, index, holds) for at_s, index, holds in timeline.gradients]
    changes.sort(key=lambda change: change[0])
    times = [timeline.end_s * column / (COLUMNS - 1) for column in range(COLUMNS)]
    places: list[list[int]] = [[] for _ in chunks]
    done = 0
    for at_s in times:
        while done < len(changes) and changes[done][0] <= at_s:
            _, members, index, present = changes[done]
            (members.add if present else members.discard)(index)
            done += 1
        for row, index in zip(places, chunks, strict=True):
            row.append(_place(index, on, gradients))
    return ResidencyMap(chunks, times, places)


def _place(index: int, on: dict[Tier, set[int]], gradients: set[int]) -> int:
    if index in on[Tier.DEVICE]:
        if index in gradients:
            return WITH_GRADIENTS
        return ON_BOTH if index in on[Tier.HOST] else ON_DEVICE
    return ON_HOST if index in on[Tier.HOST] else NOWHERE
