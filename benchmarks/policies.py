"""Simulate four prefetch policies over three models: transferred bytes and stall time.

python benchmarks/policies.py

Nothing is measured, so the result is the same on every machine; it is written to results/policies.md.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from policy_simulator import Simulated, simulate
from prefetch_policies import Conservative, LifeTime

from patrickstar._schedule.prefetch import AggressivePrefetch, DemandFetch, PrefetchPolicy
from patrickstar._schedule.trace import Moment, Trace

RESULT = Path(__file__).parent / "results" / "policies.md"
POLICIES: tuple[type[PrefetchPolicy], ...] = (DemandFetch, AggressivePrefetch, Conservative, LifeTime)

HIDDEN, VOCABULARY, LAYERS, TOKENS = 4096, 50_304, 48, 1024
BYTES_PER_PARAM = 2
SQUARE = HIDDEN * HIDDEN * BYTES_PER_PARAM
INPUT = TOKENS * HIDDEN * BYTES_PER_PARAM
# A layer saves 34 bytes per token and hidden unit for backward: about a third in attention, the rest in the
# feed-forward network (Korthikanti et al. 2022, without the attention scores).
ATTENTION_SAVES, FEED_FORWARD_SAVES = 11 * TOKENS * HIDDEN, 23 * TOKENS * HIDDEN

EXPERT_LAYERS, EXPERTS, CHOSEN, MICRO_BATCHES, SEED = 16, 16, 4, 4, 0


@dataclass
class Model:
    """Synthetic trace; the compute time of a moment is its parameter bytes times its passes."""

    nbytes: dict[int, int] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    work: list[float] = field(default_factory=list)
    saved_bytes: int = 0

    def chunk(self, nbytes: int) -> int:
        self.nbytes[len(self.nbytes)] = nbytes
        return len(self.nbytes) - 1

    def run(self, chunk: int, passes: int, saves: int = 0, frees: int = 0) -> None:
        self.saved_bytes += saves
        self.moments.append(Moment((chunk,), self.saved_bytes))
        self.work.append(float(passes * self.nbytes[chunk]))
        self.saved_bytes -= frees


def gpt(model: Model) -> tuple[int, list[tuple[int, int]], int]:
    """Add one chunk each for embedding, attention and feed-forward of every layer, and head."""
    embedding = model.chunk(VOCABULARY * HIDDEN * BYTES_PER_PARAM)
    layers = [(model.chunk(4 * SQUARE), model.chunk(8 * SQUARE)) for _ in range(LAYERS)]
    return embedding, layers, model.chunk(VOCABULARY * HIDDEN * BYTES_PER_PARAM)


def chain() -> Model:
    """Return forward and backward with all activations saved."""
    model = Model()
    embedding, layers, head = gpt(model)
    model.run(embedding, 1, saves=INPUT)
    for attention, feed_forward in layers:
        model.run(attention, 1, saves=ATTENTION_SAVES)
        model.run(feed_forward, 1, saves=FEED_FORWARD_SAVES)
    model.run(head, 3, saves=VOCABULARY * TOKENS * 4, frees=VOCABULARY * TOKENS * 4)
    for attention, feed_forward in reversed(layers):
        model.run(feed_forward, 2, frees=FEED_FORWARD_SAVES)
        model.run(attention, 2, frees=ATTENTION_SAVES)
    model.run(embedding, 2, frees=INPUT)
    return model


def checkpointed() -> Model:
    """Return forward and backward with activation checkpointing: only layer inputs are saved."""
    model = Model()
    embedding, layers, head = gpt(model)
    model.run(embedding, 1, saves=INPUT)
    for attention, feed_forward in layers:
        model.run(attention, 1, saves=INPUT + ATTENTION_SAVES, frees=ATTENTION_SAVES)
        model.run(feed_forward, 1, saves=FEED_FORWARD_SAVES, frees=FEED_FORWARD_SAVES)
    model.run(head, 3, saves=VOCABULARY * TOKENS * 4, frees=VOCABULARY * TOKENS * 4)
    for attention, feed_forward in reversed(layers):
        model.run(attention, 1, saves=ATTENTION_SAVES)
        model.run(feed_forward, 1, saves=FEED_FORWARD_SAVES)
        model.run(feed_forward, 2, frees=FEED_FORWARD_SAVES)
        model.run(attention, 2, frees=ATTENTION_SAVES + INPUT)
    model.run(embedding, 2, frees=INPUT)
    return model


def experts() -> Model:
    """Return micro-batches that each use other experts in each layer."""
    model, rng = Model(), random.Random(SEED)
    layers = [(model.chunk(4 * SQUARE), [model.chunk(SQUARE) for _ in range(EXPERTS)]) for _ in range(EXPERT_LAYERS)]
    for _ in range(MICRO_BATCHES):
        chosen = [[attention, *sorted(rng.sample(available, CHOSEN))] for attention, available in layers]
        for chunks in chosen:
            for chunk in chunks:
                model.run(chunk, 1, saves=INPUT)
        for chunks in reversed(chosen):
            for chunk in reversed(chunks):
                model.run(chunk, 2, frees=INPUT)
    return model


def play(model: Model, policy: type[PrefetchPolicy], budget_bytes: int, rate: float) -> Simulated:
    trace = Trace(model.moments)
    return simulate(
        trace,
        policy(trace, model.nbytes, budget_bytes),
        model.nbytes,
        budget_bytes,
        seconds=model.work,
        rate_in=rate,
        rate_out=rate,
        # One chunk in transfer, and one that follows without a gap.
        depth_bytes=2 * max(model.nbytes.values()),
    )


def rows(name: str, model: Model) -> Iterable[list[str]]:
    compute_s = sum(model.work)
    peak = max(moment.non_model_bytes for moment in model.moments)
    for part in (8, 4, 2):
        budget_bytes = sum(model.nbytes.values()) // part + peak
        demand = play(model, DemandFetch, budget_bytes, 1.0)
        balanced_rate = max(demand.fetched_bytes, demand.written_bytes) / compute_s
        for share in ("1/2", "1", "2"):
            numerator, _, denominator = share.partition("/")
            rate = balanced_rate * int(numerator) / int(denominator or 1)
            results = [play(model, policy, budget_bytes, rate) for policy in POLICIES]
            yield [
                name,
                f"1/{part}",
                share,
                *(f"{result.fetched_bytes / 2**30:.1f}" for result in results),
                *(f"{result.written_bytes / 2**30:.1f}" for result in results),
                *(f"{100 * result.stall_s / compute_s:.0f} %" for result in results),
            ]


def main() -> None:
    models = {"chain": chain(), "checkpointed": checkpointed(), "experts": experts()}
    names = [policy.__name__ for policy in POLICIES]
    columns = ["trace", "budget", "rate"]
    columns += [f"{metric}, {name}" for metric in ("GiB in", "GiB out", "stall") for name in names]
    table = [columns, ["---"] * len(columns), *(row for name, model in models.items() for row in rows(name, model))]
    sizes = "; ".join(
        f"{name}: {sum(model.nbytes.values()) / 2**30:.1f} GiB in {len(model.nbytes)} chunks, {len(model.moments)} "
        f"operators, non-model data up to {max(moment.non_model_bytes for moment in model.moments) / 2**30:.1f} GiB"
        for name, model in models.items()
    )
    text = (
        "# policies\n\n"
        "Transfers and stalls of one iteration, by simulation (`benchmarks/policy_simulator.py`): the third iteration "
        "after a start with an empty device, bf16 parameters; a chunk is written at its last use. `chain` and "
        f"`checkpointed` are a GPT of {LAYERS} layers, hidden size {HIDDEN}, {TOKENS} tokens; `experts` has "
        f"{EXPERT_LAYERS} layers of {EXPERTS} experts, of which each of {MICRO_BATCHES} micro-batches chooses {CHOSEN} "
        f"at random (seed {SEED}). Sizes: {sizes}.\n\n"
        "Budget: memory for chunks at the peak of non-model data, as a fraction of all `param16` chunks. Rate: "
        "bandwidth of each channel, as a multiple of the one that transfers the bytes of `DemandFetch` in exactly the "
        "compute time; below 1 no policy can hide all transfers. Stall: time that computation waits, relative to "
        "compute time. At most two chunks are prefetched at a time.\n\n"
        + "\n".join(f"| {' | '.join(row)} |" for row in table)
        + "\n"
    )
    print(text)
    RESULT.write_text(text)


if __name__ == "__main__":
    main()
