"""Training loops on the strict device that together use every copy, wait and order of an engine.

As a program it runs scenarios until one fails, with one statement of one module removed:
`python scenarios.py MODULE LINE COUNT`. See [Note: removed statements] in `test_removed_statements.py`.
"""

import ast
import faulthandler
import importlib.abc
import importlib.util
import os
import random
import sys
import tempfile
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

WIDTH, LAYERS, STEPS = 48, 6, 4
_EXPECTED: dict[Any, Any] = {}
PARAM16_BYTES = LAYERS * 2 * (WIDTH * WIDTH + WIDTH)


def run(seed: int) -> None:
    """Run a random loop with random budgets by a random schedule, and compare it with plain PyTorch."""
    import strict_device
    import torch
    import toys
    from torch import nn

    import patrickstar as ps
    from patrickstar import testing
    from patrickstar._engine.engine import Engine
    from patrickstar._schedule.prefetch import AggressivePrefetch, DemandFetch

    def build() -> nn.Module:
        return toys.layers(WIDTH, LAYERS, nn.GELU)

    def loop(trainer: Any, accumulation: int, clip: bool, reads: bool, update: bool = False) -> list[torch.Tensor]:
        """Train some steps without a wait between them."""
        results = []
        for number, (batch,) in enumerate(data(accumulation * STEPS)):
            last = number % accumulation == accumulation - 1
            loss = trainer(batch).float().square().mean()
            trainer.backward(loss / accumulation, **({"update": True} if update and last else {}))
            results.append(loss.detach().clone())
            if not last:
                continue
            if clip:
                results.append(trainer.clip_grad_norm_(0.5).clone())
            trainer.optimizer.step()
            trainer.optimizer.zero_grad()
            if reads and number == accumulation * STEPS // 2:
                results += [value.clone() for value in trainer.state_dict().values()]
                with torch.no_grad():
                    results.append(trainer.eval()(batch).clone())
                trainer.train()
        return results

    def data(count: int) -> list[tuple[torch.Tensor]]:
        return [(batch.to("strict"),) for (batch,) in toys.inputs(count, width=WIDTH, rows=24)]

    def expected(*options: Any) -> Any:
        """Return the results and parameters of plain PyTorch, which are the same in all scenarios of these options."""
        if options not in _EXPECTED:
            strict_device.configure()
            torch.manual_seed(0)
            reference = testing.ReferenceTrainer(build, ps.Config(device="strict"))
            _EXPECTED[options] = loop(reference, *options), reference.state_dict()
        return _EXPECTED[options]

    choice = random.Random(seed)
    accumulation, clip, reads = choice.choice([1, 1, 2]), choice.random() < 0.3, choice.random() < 0.4
    results, parameters = expected(accumulation, clip, reads)
    with tempfile.TemporaryDirectory() as directory:
        disk = ps.Disk(directory) if choice.random() < 0.35 else None
        config = ps.Config(
            device="strict",
            chunk_size=choice.choice(["5KiB", "10KiB"]),
            device_memory=int(choice.choice([0.45, 0.7, 1.6, 20]) * PARAM16_BYTES) + 16384,
            host_memory="300KiB" if disk is not None else "4MiB",
            disk=disk,
            activation_offload=choice.random() < 0.3,
        )
        strict_device.configure(seed=seed)
        torch.manual_seed(0)
        policy = choice.choice([None, AggressivePrefetch, DemandFetch])
        engine = Engine(
            build,
            config,
            meter=testing.NoMeter(),
            poison=True,
            page_bytes=4096,
            prefetch_policy=policy,
            evict_everything=choice.random() < 0.2,
        )
        try:
            update = accumulation == 1 and not clip and choice.random() < 0.4
            found = loop(engine, accumulation, clip, reads, update)
            if choice.random() < 0.5:  # close with copies in flight
                module = engine.module
                engine(data(1)[0][0])
                engine.close()
                values = {name: value.detach() for name, value in module.state_dict().items()}
            else:
                values = engine.state_dict()
            testing.assert_same_bits(results, found, f"scenario {seed}: results")
            testing.assert_same_bits(parameters, dict(values), f"scenario {seed}: parameters")
        finally:
            engine.close()


class Removal(importlib.abc.MetaPathFinder, SourceFileLoader):
    """Importer of a module without the statement that begins in one line."""

    def __init__(self, name: str, path: str, line: int) -> None:
        super().__init__(name, path)
        self.line = line
        self.removed = 0

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """Find the module, and leave all others to other importers."""
        return (
            importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None
        )

    def get_code(self, fullname: str) -> Any:
        """Return the module's code with `pass` in place of the statement."""
        tree = ast.parse(Path(self.path).read_text())

        class Remover(ast.NodeTransformer):
            def visit(transformer, node: ast.AST) -> Any:
                if isinstance(node, ast.stmt) and node.lineno == self.line and not hasattr(node, "body"):
                    self.removed += 1
                    return ast.copy_location(ast.Pass(), node)
                return transformer.generic_visit(node)

        code = compile(ast.fix_missing_locations(Remover().visit(tree)), self.path, "exec")
        assert self.removed == 1, f"{self.removed} statements begin in line {self.line} of {self.path}"
        return code


def main(module: str, path: str, line: int, count: int) -> None:
    """Run scenarios with one statement removed; return if none fails."""
    faulthandler.enable()
    sys.meta_path.insert(0, Removal(module, path, line))
    for seed in range(count):
        run(seed)


if __name__ == "__main__":
    os.environ["PATRICKSTAR_TEST_DEVICE"] = "strict"
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
