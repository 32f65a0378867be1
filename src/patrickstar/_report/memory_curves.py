"""Bytes on each tier over a step, by what they are."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from patrickstar._layout.schema import BUFFERED_GRAD, DELAYED16, GRAD32, KEPT32, NODE16, PARAM16, SHARD16, SUM32
from patrickstar._schedule.placement import Tier
from patrickstar._schedule.step_timeline import StepTimeline

PARAMETERS, GRADIENTS = "parameters", "gradients"
STATES = "masters and optimizer states"
ACTIVATIONS = "activations and workspaces"
BUFFERS = "buffers and offloaded activations"
PARAMETER_KINDS = (PARAM16, SHARD16, NODE16, "buffered16")
GRADIENT_KINDS = (GRAD32, KEPT32, SUM32, DELAYED16, BUFFERED_GRAD)
CATEGORIES = {
    Tier.DEVICE: (PARAMETERS, GRADIENTS, STATES, ACTIVATIONS),
    Tier.HOST: (PARAMETERS, GRADIENTS, STATES, BUFFERS),
}
"""Categories of each tier in memory, in the order in which they are stacked."""

POINTS = 600
"""Largest number of points of a curve: more than a picture has columns for."""


@dataclass(frozen=True)
class MemoryCurves:
    """Bytes on one tier from each time on, in seconds since the step's start, by category."""

    tier: Tier
    times: list[float]
    values: dict[str, list[int]]

    @property
    def peak(self) -> int:
        """Largest sum over all categories."""
        return max(map(sum, zip(*self.values.values(), strict=True)), default=0)


def category_of(kind: str, holds_gradients: bool = False) -> str:
    """Return the category of a chunk."""
    if kind in PARAMETER_KINDS:
        return GRADIENTS if holds_gradients else PARAMETERS
    return GRADIENTS if kind in GRADIENT_KINDS else STATES


def memory_curves(timeline: StepTimeline, tier: Tier) -> MemoryCurves:
    """Return the bytes on the device or the host over a step."""
    present: dict[tuple[str, int], int] = {}
    gradients: set[int] = set()
    sums: dict[str, int] = dict.fromkeys(CATEGORIES[tier], 0)
    points: list[tuple[float, dict[str, int]]] = []
    for at_s, change in _changes(timeline, tier):
        if isinstance(change, tuple) and len(change) == 2:  # a chunk of parameters begins or ends to hold gradients
            index, holds = change
            nbytes = present.get((PARAM16, index), 0)
            (gradients.add if holds else gradients.discard)(index)
            sums[GRADIENTS] += nbytes if holds else -nbytes
            sums[PARAMETERS] -= nbytes if holds else -nbytes
        elif isinstance(change, tuple):
            kind, index, nbytes = change
            category = category_of(kind, kind == PARAM16 and index in gradients)
            sums[category] += nbytes
            present[kind, index] = present.get((kind, index), 0) + nbytes
        else:
            sums[CATEGORIES[tier][-1]] = change
        if points and points[-1][0] == at_s:
            points.pop()
        points.append((at_s, dict(sums)))
    points.append((timeline.end_s, dict(sums)))
    points = _thinned(points, timeline.end_s)
    values: dict[str, list[int]] = defaultdict(list)
    for _, found in points:
        for name, nbytes in found.items():
            values[name].append(nbytes)
    return MemoryCurves(tier, [at_s for at_s, _ in points], dict(values))


Change = tuple[str, int, int] | tuple[int, bool] | int
"""Bytes of a chunk that come or go, whether a chunk of parameters holds gradients, or the bytes beside chunks."""


def _changes(timeline: StepTimeline, tier: Tier) -> Iterator[tuple[float, Change]]:
    changes: list[tuple[float, Change]] = [
        (each.at_s, (each.kind, each.index, each.nbytes if each.present else -each.nbytes))
        for each in (*timeline.initial, *timeline.residency)
        if each.tier is tier
    ]
    changes += [(at_s, (index, holds)) for at_s, index, holds in timeline.gradients]
    if tier is Tier.DEVICE:
        changes += timeline.non_model
    else:
        changes += timeline.host_other
    yield from sorted(changes, key=lambda each: each[0])


def _thinned(points: Sequence[tuple[float, dict[str, int]]], end_s: float) -> list[tuple[float, dict[str, int]]]:
    """Return at most `POINTS` points: of those in one column of the picture, the one with the largest sum."""
    if len(points) <= POINTS or end_s <= 0:
        return list(points)
    columns: dict[int, tuple[float, dict[str, int]]] = {}
    for point in points:
        column = int(point[0] / end_s * (POINTS - 1))
        if column not in columns or sum(point[1].values()) > sum(columns[column][1].values()):
            columns[column] = point
    return list(columns.values())
