"""Advice on what would make a run faster, in words: what the waits of a recorded step say."""

from collections.abc import Sequence

from patrickstar._layout.byte_size import format_size
from patrickstar._report.products import about_products
from patrickstar._report.run_file import Run
from patrickstar._report.stalls import NamedStall, covered_s
from patrickstar._schedule.step_timeline import Channel, StepTimeline

WORTH = 0.02
"""Share of a step below which a wait is not worth advice."""
DRY_RUN = (
    "How long a step takes with more memory or other parts, a dry run says: `patrickstar train --dry-run` with another "
    "--device-memory, --host-memory or --machine."
)

LACKING = {
    Channel.TO_DEVICE: ("device memory", "is copied to the device in a step"),
    Channel.DISK_READ: ("host memory", "is read from the disk in a step"),
}
"""Memory that a channel's work makes up for, and what the work is."""


def advice(run: Run, timeline: StepTimeline, stalls: Sequence[NamedStall]) -> list[str]:
    """Return sentences about what would make the step of a timeline faster, the longest wait first.

    On a CPU the rate of products is compared with the machine's.

    Args:
        run: The run.
        timeline: Timeline of one of its steps.
        stalls: The step's waits.
    """
    return [*about_products(run, timeline), *_about_waits(timeline, stalls)]


def _about_waits(timeline: StepTimeline, stalls: Sequence[NamedStall]) -> list[str]:
    seconds, waited_s = timeline.seconds, covered_s(stalls)
    if waited_s < WORTH * seconds:
        return [
            f"Computation waits for {waited_s / seconds:.1%} of the step: neither more memory nor faster transfers "
            f"would make it faster, only faster or fewer operations."
        ]
    return [*_from_waits(timeline, stalls), DRY_RUN]


def _from_waits(timeline: StepTimeline, stalls: Sequence[NamedStall]) -> list[str]:
    """Return sentences about the channels that were waited for, the longest wait first."""
    seconds, waited_s = timeline.seconds, covered_s(stalls)
    found = []
    for channel in Channel:
        own = [stall for stall in stalls if stall.channel == channel]
        if (own_s := covered_s(own)) >= WORTH * seconds:
            found.append((own_s, _about(channel, own_s, timeline)))
    gain = 2 * seconds / (2 * (seconds - waited_s) + waited_s) - 1
    found.append(
        (
            0.0,
            f"A larger batch: waits stay about as long while computation grows, so that twice the batch gives up to "
            f"{gain:.0%} more tokens per second, if its activations fit.",
        )
    )
    return [text for _, text in sorted(found, reverse=True)]


def _about(channel: Channel, waited_s: float, timeline: StepTimeline) -> str:
    works = [work for work in timeline.work if work.channel is channel]
    sizes, nbytes = {work.label: work.nbytes for work in works}, sum(work.nbytes for work in works)
    measured = channel_rate(timeline, channel)
    rate = f"{measured / 1e9:.2f} GB/s" if measured is not None else "an unknown rate"
    share = f"{waited_s:.3f} s of {timeline.seconds:.3f} s ({waited_s / timeline.seconds:.0%})"
    text = f"Computation waits {share} for {channel.value}, which moves {format_size(nbytes)} at {rate}."
    if channel in LACKING:
        memory, what = LACKING[channel]
        lacking = format_size(sum(sizes.values()))
        return f"{text} {lacking} more {memory} would hold all that {what}, and save this wait."
    return f"{text} Twice its rate would save up to half of this wait."


def channel_rate(timeline: StepTimeline, channel: Channel) -> float | None:
    """Return the bytes per second of a channel while it was busy; None if no work of it was recorded."""
    works = [work for work in timeline.work if work.channel is channel and work.nbytes]
    busy_s = covered_s(works)
    return sum(work.nbytes for work in works) / busy_s if busy_s > 0 else None
