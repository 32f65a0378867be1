"""Advice on what would make a run faster, in words: estimates of a recorded step, or what its waits say."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from patrickstar._layout.byte_size import format_size
from patrickstar._perf_model.text_tables import format_seconds
from patrickstar._report.products import about_products
from patrickstar._report.run_file import Run
from patrickstar._report.stalls import NamedStall, stalled_s
from patrickstar._report.step_model import DISK, LINKS, NoEstimateError, StepModel, channel_rate
from patrickstar._schedule.step_timeline import Channel, StepTimeline

WORTH = 0.02
"""Share of a step below which a wait, or an estimated gain, is not worth advice."""

LACKING = {
    Channel.TO_DEVICE: ("device memory", "is copied to the device in a step"),
    Channel.DISK_READ: ("host memory", "is read from the disk in a step"),
}
"""Memory that a channel's work makes up for, and what the work is."""

Advice = tuple[float, str]
"""Estimated gain, as a share of the step, and a sentence."""


def advice(run: Run, timeline: StepTimeline, stalls: Sequence[NamedStall]) -> list[str]:
    """Return sentences about what would make the step of a timeline faster, the largest gain first.

    They are estimates by the performance model at the rates that were measured in the step. If it does not describe the
    step, a sentence says so, and the others are about the waits. On a CPU the rate of products is compared with the
    machine's.

    Args:
        run: The run.
        timeline: Timeline of one of its steps.
        stalls: The step's waits.
    """
    return [*about_products(run, timeline), *_about_waits(run, timeline, stalls)]


def _about_waits(run: Run, timeline: StepTimeline, stalls: Sequence[NamedStall]) -> list[str]:
    seconds, waited_s = timeline.seconds, stalled_s(stalls)
    if waited_s < WORTH * seconds:
        return [
            f"Computation waits for {waited_s / seconds:.1%} of the step: neither more memory nor faster transfers "
            f"would make it faster, only faster or fewer operations."
        ]
    try:
        found = _estimates(StepModel.of(run, timeline, stalls), timeline)
    except NoEstimateError as reason:
        return [
            f"There is no estimate: {reason}. What follows is from the waits alone.",
            *_from_waits(timeline, stalls),
        ]
    if not found:
        return [
            f"By the estimate neither memory, faster transfers nor twice the batch would save {WORTH:.0%} of the step. "
            "What follows is from the waits alone.",
            *_from_waits(timeline, stalls),
        ]
    return [text for _, text in sorted(found, reverse=True)]


# Estimates


def _estimates(model: StepModel, timeline: StepTimeline) -> list[Advice]:
    """Return the changes that are worth it."""
    base_s, lacking = model.seconds(), model.lacking_device_bytes
    found = list(
        _more_memory(
            base_s,
            (min(extra, lacking) for extra in (model.device_bytes // 4, model.device_bytes, lacking)),
            lambda extra: model.with_memory(device_bytes=extra),
            "device memory",
            _rates(model, LINKS),
        )
    )
    if Channel.DISK_READ in model.rates:
        on_disk = max((nbytes for _, nbytes in timeline.disk), default=0)
        found += _more_memory(
            base_s,
            (min(extra, on_disk) for extra in (model.host_bytes // 4, model.host_bytes, on_disk)),
            lambda extra: model.with_memory(host_bytes=extra),
            "host memory",
            _rates(model, DISK),
        )
    faster = {
        "A disk twice as fast": DISK,
        "Links between host and device twice as fast": LINKS,
        "Updates on the host twice as fast": (Channel.UPDATE,),
    }
    for name, channels in faster.items():
        if rates := _rates(model, channels):
            found += _change(base_s, model.with_twice_the_rate(channels), name, rates)
    return [*found, *_twice_the_batch(base_s, model)]


def _more_memory(
    base_s: float, amounts: Iterable[int], changed: Callable[[int], StepModel], name: str, rates: str
) -> Iterator[Advice]:
    """Yield amounts of memory, of which each saves more than the one before."""
    reached_s = base_s
    for extra in sorted(set(amounts)):
        model = changed(extra)
        if reached_s - model.seconds() >= WORTH * base_s:
            reached_s = model.seconds()
            yield from _change(base_s, model, f"{format_size(extra)} more {name}", rates)


def _change(base_s: float, model: StepModel, name: str, rates: str) -> Iterator[Advice]:
    """Yield the sentence on a change, if it is worth it."""
    seconds = model.seconds()
    if base_s - seconds >= WORTH * base_s:
        times = f"{format_seconds(seconds)} per step instead of {format_seconds(base_s)}"
        yield 1 - seconds / base_s, f"{name}: {times} (estimate; measured: {rates})."


def _twice_the_batch(base_s: float, model: StepModel) -> Iterator[Advice]:
    """Yield the sentence on twice the batch, if it fits and is worth it."""
    if not model.twice_the_batch_fits:
        return
    try:
        seconds = model.with_twice_the_batch().seconds()
    except NoEstimateError:  # its activations leave no place for the parameters
        return
    gain = 1 - seconds / (2 * base_s)
    if gain >= WORTH:
        times = f"{format_seconds(seconds)} per step instead of {format_seconds(base_s)}"
        more = f"{2 * base_s / seconds - 1:.0%} more tokens per second"
        yield gain, f"Twice the batch: {times}, so {more} (estimate; measured: {_rates(model, LINKS)})."


def _rates(model: StepModel, channels: Iterable[Channel]) -> str:
    """Return the measured rates of channels in words; nothing for those that the step did not use."""
    return ", ".join(
        f"{channel.value} {model.rates[channel] / 1e9:.2f} GB/s" for channel in channels if channel in model.rates
    )


# Waits


def _from_waits(timeline: StepTimeline, stalls: Sequence[NamedStall]) -> list[str]:
    """Return sentences about the channels that were waited for, the longest wait first."""
    seconds, waited_s = timeline.seconds, stalled_s(stalls)
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
