"""Products of a recorded step on a CPU beside what a core of this machine reaches, in words and as a table."""

from collections.abc import Iterable, Sequence

from patrickstar._perf_model.cpu_precision import faster_on_cpu, gflops
from patrickstar._perf_model.text_tables import format_seconds
from patrickstar._report.run_file import Run
from patrickstar._schedule.step_timeline import Product, StepTimeline

LISTED = 8
"""Number of products in the table of the slowest."""


def about_products(run: Run, timeline: StepTimeline) -> list[str]:
    """Return sentences about the rate of a step's products, the machine's rates, and what would be faster.

    Args:
        run: The run.
        timeline: Timeline of one of its steps.

    Returns:
        The sentences, one with a gain first; none if the step has no times of products or the log no rates.
    """
    rates, products = run.description.get("core_rates"), timeline.products
    if not rates or not sum(each.operations for each in products):
        return []
    threads, own = run.description["threads"], run.description["precision"]
    seconds = sum(each.seconds for each in products)
    slowest = max(products, key=lambda each: each.seconds)
    known = " and ".join(f"{gflops(rate)} in {name}" for name, rate in rates.items())
    reached = _core_rate(products, threads)
    found = [
        f"Products of parameters take {seconds / timeline.seconds:.0%} of the step, at {gflops(reached)} on each of "
        f"{threads} {'core' if threads == 1 else 'cores'} in {own}. A core of this machine computes such products at "
        f"{known} (measured when the recording began): the step reaches {reached / rates[own]:.0%} of its rate in "
        f"{own}. The rest is lost to small products, to other work on the cores and to waits of one for another. The "
        f"slowest is {_name(slowest)}: {slowest.seconds / timeline.seconds:.0%} of the step, "
        f"{_rate_of(slowest, threads)}."
    ]
    faster = faster_on_cpu(rates["bf16"], rates["fp32"])
    saved_s = seconds * (1 - rates[own] / rates[faster])
    if faster != own and saved_s > 0:
        times = f"{format_seconds(timeline.seconds - saved_s)} per step instead of {format_seconds(timeline.seconds)}"
        ratio = f"{rates[faster] / rates[own]:.1f} times faster"
        found.insert(0, f'precision="{faster}": {times} (estimate; its products are {ratio} here).')
    return found


def slowest_rows(run: Run, timeline: StepTimeline) -> list[tuple[str, ...]]:
    """Return rows of the products that took longest: milliseconds, share of the step, product, rate of a core."""
    longest = sorted(timeline.products, key=lambda each: each.seconds, reverse=True)[:LISTED]
    threads = run.description.get("threads", 1)
    return [
        (
            f"{1e3 * each.seconds:.2f}",
            f"{each.seconds / timeline.seconds:.0%}",
            _name(each),
            _rate_of(each, threads),
        )
        for each in longest
    ]


def _name(product: Product) -> str:
    return f"the {'backward' if product.backward else 'forward'} of {product.name}"


def _rate_of(product: Product, threads: int) -> str:
    """Return the rate of a core in words; a product of no operations or no time has none."""
    return gflops(_core_rate([product], threads)) if product.operations and product.seconds else "no rate"


def _core_rate(products: Iterable[Product], threads: int) -> float:
    """Return the operations per second of one of some threads."""
    each: Sequence[Product] = list(products)
    return sum(one.operations for one in each) / sum(one.seconds for one in each) / threads
