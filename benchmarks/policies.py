"""What prefetching is worth, by simulation: bytes moved and time waited, for four policies over three models.

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
# 34 bytes per token and hidden unit are saved for the backward pass of a layer: about a third by attention, the rest
# by the feed-forward part (Korthikanti et al. 2022, without the attention scores).
ATTENTION_SAVES, FEED_FORWARD_SAVES = 11 * TOKENS * HIDDEN, 23 * TOKENS * HIDDEN

EXPERT_LAYERS, EXPERTS, CHOSEN, MICRO_BATCHES, SEED = 16, 16, 4, 4, 0


@dataclass
class Model:
    """A trace as it is written down; a moment computes as long as it has parameters times passes."""

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
    """An embedding, per layer attention and feed-forward, and a head: a chunk each."""
    embedding = model.chunk(VOCABULARY * HIDDEN * BYTES_PER_PARAM)
    layers = [(model.chunk(4 * SQUARE), model.chunk(8 * SQUARE)) for _ in range(LAYERS)]
    return embedding, layers, model.chunk(VOCABULARY * HIDDEN * BYTES_PER_PARAM)


def chain() -> Model:
    """Forward and backward; all activations are kept."""
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
    """Each layer runs once more before its backward; only its input is kept."""
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
    """Micro-batches that each choose other experts in each layer."""
    model, choice = Model(), random.Random(SEED)
    layers = [(model.chunk(4 * SQUARE), [model.chunk(SQUARE) for _ in range(EXPERTS)]) for _ in range(EXPERT_LAYERS)]
    for _ in range(MICRO_BATCHES):
        chosen = [[attention, *sorted(choice.sample(those, CHOSEN))] for attention, those in layers]
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
        # One chunk that is on its way, and one that follows without a gap.
        depth_bytes=2 * max(model.nbytes.values()),
    )


def rows(name: str, model: Model) -> Iterable[list[str]]:
    compute_s = sum(model.work)
    peak = max(moment.non_model_bytes for moment in model.moments)
    for part in (8, 4, 2):
        budget_bytes = sum(model.nbytes.values()) // part + peak
        demand = play(model, DemandFetch, budget_bytes, 1.0)
        enough = max(demand.fetched_bytes, demand.written_bytes) / compute_s
        for share in ("1/2", "1", "2"):
            numerator, _, denominator = share.partition("/")
            rate = enough * int(numerator) / int(denominator or 1)
            found = [play(model, policy, budget_bytes, rate) for policy in POLICIES]
            yield [
                name,
                f"1/{part}",
                share,
                *(f"{each.fetched_bytes / 2**30:.1f}" for each in found),
                *(f"{each.written_bytes / 2**30:.1f}" for each in found),
                *(f"{100 * each.stall_s / compute_s:.0f} %" for each in found),
            ]


def main() -> None:
    models = {"chain": chain(), "checkpointed": checkpointed(), "experts": experts()}
    names = [policy.__name__ for policy in POLICIES]
    columns = ["trace", "budget", "rate"]
    columns += [f"{what}, {name}" for what in ("GiB in", "GiB out", "stall") for name in names]
    table = [columns, ["---"] * len(columns), *(row for name, model in models.items() for row in rows(name, model))]
    sizes = "; ".join(
        f"{name}: {sum(model.nbytes.values()) / 2**30:.1f} GiB in {len(model.nbytes)} chunks, {len(model.moments)} "
        f"operators, non-model data {max(moment.non_model_bytes for moment in model.moments) / 2**30:.1f} GiB at most"
        for name, model in models.items()
    )
    text = (
        "# policies\n\n"
        "What one iteration moves and waits, by simulation (`schedule/simulator.py`): the third of three from an empty "
        "device, bf16 parameters, a chunk is written at its last use. `chain` and `checkpointed` are a GPT of "
        f"{LAYERS} layers, hidden size {HIDDEN}, {TOKENS} tokens; `experts` has {EXPERT_LAYERS} layers of {EXPERTS} "
        f"experts, of which each of {MICRO_BATCHES} micro-batches chooses {CHOSEN} at random (seed {SEED}). Sizes: "
        f"{sizes}.\n\n"
        "Budget: what the device has at the peak of non-model data, as a share of all `param16` chunks. Rate: of each "
        "channel, as a multiple of what moves the bytes of `DemandFetch` in exactly the time that "
        "computing takes: below "
        "1 nothing can hide all of them. Stall: time that computing waits, as a share of the time it computes. Two "
        "chunks at most are under way ahead of need.\n\n" + "\n".join(f"| {' | '.join(row)} |" for row in table) + "\n"
    )
    print(text)
    RESULT.write_text(text)


if __name__ == "__main__":
    main()
