"""Measure the optimizer step with Muon against its products of matrices alone.

python benchmarks/muon.py [--device cpu] [--model gpt-40m] [--rounds 11]
Masters and momentum are on the host tier, parameters on the device tier. Each step is followed by the same products on
matrices of the same shapes, and by a step with AdamW of a second engine; their medians are compared.
"""

import argparse
import time
from statistics import median

import torch
from gpu_stages.timing import synchronize
from report import publish
from trainer import build

import patrickstar as ps
from patrickstar._kernels.muon import orthogonalize
from patrickstar.optim.muon import hidden_matrices

WARM_UP = 2


def seconds_of_step(engine: ps.Engine, ids: torch.Tensor) -> float:
    """Return the seconds of an optimizer step with all its updates."""
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    synchronize(engine.device)
    start = time.perf_counter()
    engine.optimizer.step()
    engine.optimizer.flush()
    synchronize(engine.device)
    return time.perf_counter() - start


def seconds_of_products(shapes: list[torch.Size], optimizer: ps.Muon, device: torch.device) -> float:
    """Return the seconds of the Newton-Schulz iterations alone."""
    matrices = [torch.randn(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
    synchronize(device)
    start = time.perf_counter()
    for matrix in matrices:
        orthogonalize(matrix, optimizer.ns_coefficients, optimizer.ns_steps, optimizer.eps)
    synchronize(device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", default="gpt-40m")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    model = build(options.model)
    shapes = [param.shape for param in hidden_matrices(model)]
    numel = sum(param.numel() for param in model.parameters())
    matrices = sum(shape.numel() for shape in shapes)
    # Room for the parameters, activations and the workspace, and not for masters and states.
    memory = {"device_memory": 2 * numel + (200 << 20), "host_memory": 20 * numel}
    muon = ps.Muon()
    engines = [
        ps.initialize(build(options.model), ps.Config(device=options.device, optimizer=optimizer, **memory))[0]
        for optimizer in (muon, ps.AdamW())
    ]
    ids = torch.randint(0, model.config.vocab_size, (1, 128))
    rounds = []
    for _ in range(WARM_UP + options.rounds):
        step, adamw = (seconds_of_step(engine, ids) for engine in engines)
        rounds.append((step, seconds_of_products(shapes, muon, engines[0].device), adamw))
    tiers = {param.optimizer_tier for param in engines[0].inspect().parameters}
    for engine in engines:
        engine.close(keep=False)
    step, products, adamw = (median(values) for values in zip(*rounds[WARM_UP:], strict=True))
    ratio = median(each[0] / each[1] for each in rounds[WARM_UP:])
    work = sum(operations_of_iteration(shape) for shape in shapes) * muon.ns_steps
    publish(
        "muon",
        options.device,
        f"{__doc__}\n{len(shapes)} matrices with {matrices:,} of {numel:,} parameters; states on: {', '.join(tiers)}.",
        ["", "median of " + str(options.rounds)],
        [
            ["step with Muon, s", f"{step:.3f}"],
            ["its products alone, s", f"{products:.3f} ({work / products / 1e9:.0f} GFLOP/s in bf16)"],
            ["step / products (limit 1.3)", f"{ratio:.3f}"],
            ["step with AdamW, s", f"{adamw:.3f}"],
        ],
    )


def operations_of_iteration(shape: torch.Size) -> float:
    """Return the operations of one iteration: two products of the short side's square and one more."""
    short, long = sorted(shape)
    return 2.0 * (short * short * long * 2 + short**3)


if __name__ == "__main__":
    main()
