"""Simulate four prefetch policies over three models: transferred bytes and stall time.

python benchmarks/policies.py

Nothing is measured, so the result is the same on every machine; it is written to results/policies.md.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

from policy_simulator import Simulated, simulate
from prefetch_policies import Conservative, LifeTime
from report import publish_text, table

from patrickstar._schedule.prefetch import AggressivePrefetch, DemandFetch, PrefetchPolicy
from patrickstar._schedule.trace import Moment, Trace

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


def transformer(checkpointing: bool) -> Model:
    """Return forward and backward of a GPT: with all activations saved, or only layer inputs."""
    model = Model()
    embedding, layers, head = gpt(model)
    model.run(embedding, 1, saves=INPUT)
    for attention, feed_forward in layers:
        if checkpointing:
            model.run(attention, 1, saves=INPUT + ATTENTION_SAVES, frees=ATTENTION_SAVES)
            model.run(feed_forward, 1, saves=FEED_FORWARD_SAVES, frees=FEED_FORWARD_SAVES)
        else:
            model.run(attention, 1, saves=ATTENTION_SAVES)
            model.run(feed_forward, 1, saves=FEED_FORWARD_SAVES)
    model.run(head, 3, saves=VOCABULARY * TOKENS * 4, frees=VOCABULARY * TOKENS * 4)
    for attention, feed_forward in reversed(layers):
        if checkpointing:
            model.run(attention, 1, saves=ATTENTION_SAVES)
            model.run(feed_forward, 1, saves=FEED_FORWARD_SAVES)
        model.run(feed_forward, 2, frees=FEED_FORWARD_SAVES)
        model.run(attention, 2, frees=ATTENTION_SAVES + (INPUT if checkpointing else 0))
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


def rows(name: str, model: Model) -> Iterable[dict[str, str]]:
    compute_s = sum(model.work)
    peak = max(moment.non_model_bytes for moment in model.moments)
    for part in (8, 4, 2):
        budget_bytes = sum(model.nbytes.values()) // part + peak
        demand = play(model, DemandFetch, budget_bytes, 1.0)
        balanced_rate = max(demand.fetched_bytes, demand.written_bytes) / compute_s
        for share in ("1/2", "1", "2"):
            rate = balanced_rate * float(Fraction(share))
            results = {policy.__name__: play(model, policy, budget_bytes, rate) for policy in POLICIES}
            row = {"trace": name, "budget": f"1/{part}", "rate": share}
            row |= {f"GiB in, {key}": f"{each.fetched_bytes / 2**30:.1f}" for key, each in results.items()}
            row |= {f"GiB out, {key}": f"{each.written_bytes / 2**30:.1f}" for key, each in results.items()}
            yield row | {f"stall, {key}": f"{100 * each.stall_s / compute_s:.0f} %" for key, each in results.items()}


def described(name: str, model: Model) -> str:
    peak_bytes = max(moment.non_model_bytes for moment in model.moments)
    size = f"{sum(model.nbytes.values()) / 2**30:.1f} GiB in {len(model.nbytes)} chunks"
    return f"{name}: {size}, {len(model.moments)} operators, non-model data up to {peak_bytes / 2**30:.1f} GiB"


def main() -> None:
    models = {"chain": transformer(False), "checkpointed": transformer(True), "experts": experts()}
    publish_text(
        "policies",
        gpt=f"a GPT of {LAYERS} layers, hidden size {HIDDEN}, {TOKENS} tokens",
        experts=f"{EXPERT_LAYERS} layers of {EXPERTS} experts, of which each of {MICRO_BATCHES} micro-batches chooses "
        f"{CHOSEN} at random (seed {SEED})",
        sizes="; ".join(described(*each) for each in models.items()),
        table=table([row for each in models.items() for row in rows(*each)]),
    )


if __name__ == "__main__":
    main()
