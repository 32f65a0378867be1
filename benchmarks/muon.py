"""Measure the optimizer step with Muon against its products of matrices alone.

python benchmarks/muon.py [--device cpu] [--model gpt-40m] [--rounds 11]
Masters and momentum are on the host tier, parameters on the device tier. Each step is followed by the same products on
matrices of the same shapes, and by a step with AdamW of a second engine; their medians are compared.
"""

from statistics import median

import torch
from gpu_stages.timing import once
from report import options, publish
from steps import NO_DROPOUT, gpt, ratio_of, tokens

import patrickstar as ps
from patrickstar._kernels.muon import orthogonalize
from patrickstar.optim.muon import hidden_matrices

WARM_UP = 2


def seconds_of_step(engine: ps.Engine, ids: torch.Tensor) -> float:
    """Return the seconds of an optimizer step with all its updates."""
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    return once(lambda: (engine.optimizer.step(), engine.optimizer.flush()), engine.device)


def seconds_of_products(shapes: list[torch.Size], optimizer: ps.Muon, device: torch.device) -> float:
    """Return the seconds of the Newton-Schulz iterations alone."""
    settings = optimizer.ns_coefficients, optimizer.ns_steps, optimizer.eps
    matrices = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    return once(lambda: [orthogonalize(matrix, *settings) for matrix in matrices], device)


def operations_of_iteration(shape: torch.Size) -> float:
    """Return the operations of one iteration: two products of the short side's square and one more."""
    short, long = sorted(shape)
    return 2.0 * (short * short * long * 2 + short**3)


def main() -> None:
    given = options(__doc__, device="cpu", model="gpt-40m", rounds=11)
    model = gpt(given.model, **NO_DROPOUT)
    shapes = [param.shape for param in hidden_matrices(model)]
    numel = sum(param.numel() for param in model.parameters())
    # Room for the parameters, activations and the workspace, and not for masters and states.
    memory = {"device_memory": 2 * numel + (200 << 20), "host_memory": 20 * numel}
    muon = ps.Muon()
    engines = []
    for optimizer in (muon, ps.AdamW()):
        config = ps.Config(device=given.device, optimizer=optimizer, **memory)
        engines.append(ps.initialize(gpt(given.model, **NO_DROPOUT), config)[0])
    ids = tokens(given.model, 1, 128)
    rounds = []
    for _ in range(WARM_UP + given.rounds):
        step, adamw = (seconds_of_step(engine, ids) for engine in engines)
        rounds.append((step, seconds_of_products(shapes, muon, engines[0].device), adamw))
    tiers = {param.optimizer_tier for param in engines[0].inspect().parameters}
    for engine in engines:
        engine.close(keep=False)
    steps, products, others = zip(*rounds[WARM_UP:], strict=True)
    work = sum(operations_of_iteration(shape) for shape in shapes) * muon.ns_steps
    rate = work / median(products) / 1e9
    publish(
        "muon",
        given.device,
        f"{__doc__}\n{len(shapes)} matrices with {sum(shape.numel() for shape in shapes):,} of {numel:,} parameters; "
        f"states on: {', '.join(tiers)}.",
        [
            ["step with Muon, s", f"{median(steps):.3f}"],
            ["its products alone, s", f"{median(products):.3f} ({rate:.0f} GFLOP/s in bf16)"],
            ["step / products (limit 1.3)", f"{ratio_of(steps, products):.3f}"],
            ["step with AdamW, s", f"{median(others):.3f}"],
        ],
        ["", f"median of {given.rounds}"],
    )


if __name__ == "__main__":
    main()
