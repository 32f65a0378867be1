"""Advice on what would make a run faster, in words, from the waits of a recorded step."""

from collections.abc import Sequence

from patrickstar._layout.byte_size import format_size
from patrickstar._report.run_file import Run
from patrickstar._report.stalls import NamedStall, stalled_s
from patrickstar._schedule.step_timeline import Channel, StepTimeline

WORTH = 0.02
"""Share of a step below which a wait is not worth advice."""

LACKING = {
    Channel.TO_DEVICE: ("device memory", "is copied to the device in a step"),
    Channel.DISK_READ: ("host memory", "is read from the disk in a step"),
}
"""Memory that a channel's work makes up for, and what the work is."""


def advice(run: Run, timeline: StepTimeline, stalls: Sequence[NamedStall]) -> list[str]:
    """Return sentences about what would make the step of a timeline faster, the largest gain first.

    Args:
        run: The run.
        timeline: Timeline of one of its steps.
        stalls: The step's waits.
    """
    seconds, waited_s = timeline.seconds, stalled_s(stalls)
    if waited_s < WORTH * seconds:
        return [
            f"Computation waits for {waited_s / seconds:.1%} of the step: memory is enough, and transfers are hidden. "
            f"Only a faster processor, or fewer operations, would make it faster."
        ]
    found = []
    for channel in Channel:
        own = [stall for stall in stalls if stall.channel == channel]
        if (own_s := stalled_s(own)) >= WORTH * seconds:
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
    sizes = {work.label: work.nbytes for work in works}
    nbytes, busy_s = sum(work.nbytes for work in works), sum(work.end_s - work.start_s for work in works)
    rate = f"{nbytes / busy_s / 1e9:.2f} GB/s" if busy_s > 0 else "an unknown rate"
    share = f"{waited_s:.3f} s of {timeline.seconds:.3f} s ({waited_s / timeline.seconds:.0%})"
    text = f"Computation waits {share} for {channel.value}, which moves {format_size(nbytes)} at {rate}."
    if channel in LACKING:
        memory, what = LACKING[channel]
        lacking = format_size(sum(sizes.values()))
        return f"{text} {lacking} more {memory} would hold all that {what}, and save this wait."
    return f"{text} Twice its rate would save up to half of this wait."
