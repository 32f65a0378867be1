"""Measured costs of operators: one run per set of shapes, and none that the machine can't hold."""

import pytest
import torch
from probes import set_ram

from patrickstar._dry_run.op_benchmark import OpBenchmark
from patrickstar._dry_run.op_tracer import OpCost

CPU = torch.device("cpu")
FALLBACK = OpCost(1.0, 2, 3, 4, ())


@pytest.fixture
def bench():
    return OpBenchmark(CPU, 1e9, lambda func, args, kwargs, out: FALLBACK, timed=False)


def cost(bench, func, *args):
    meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    return bench(func, tuple(meta), {}, func(*meta))


def test_scratch_memory_and_results_are_those_of_the_operator(bench):
    values = torch.zeros(1 << 16)
    added = cost(bench, torch.ops.aten.add.Tensor, values, values)
    assert (added.scratch_bytes, added.results) == (0, ((values.nbytes, torch.float32),))
    mixed = cost(bench, torch.ops.aten.add.Tensor, values, values.double())
    assert mixed.results == ((2 * values.nbytes, torch.float64),)
    assert mixed.scratch_bytes > 0, "the operator casts an operand"
    assert not bench.estimated


def test_each_set_of_shapes_runs_once(bench, monkeypatch):
    runs = []
    measure = bench._measure
    monkeypatch.setattr(bench, "_measure", lambda *args: runs.append(args) or measure(*args))
    for rows in (8, 9, 8, 9):
        cost(bench, torch.ops.aten.exp.default, torch.zeros(rows, 8))
    assert len(runs) == 2


def test_an_operator_larger_than_memory_is_estimated(bench, monkeypatch):
    values = torch.zeros(1 << 10)
    set_ram(monkeypatch, 2 * values.nbytes - 1)
    assert cost(bench, torch.ops.aten.exp.default, values) is FALLBACK
    assert bench.estimated == {"aten.exp.default"}
    set_ram(monkeypatch, 2 * values.nbytes)
    assert cost(bench, torch.ops.aten.exp.default, torch.zeros(1 << 10, dtype=torch.float32)) is FALLBACK, "known"
    assert cost(bench, torch.ops.aten.log.default, values) is not FALLBACK


def test_a_measured_operator_of_a_cpu_is_not_launched():
    found = cost(OpBenchmark(CPU, 1e12, lambda *args: OpCost(9.0)), torch.ops.aten.exp.default, torch.zeros(64))
    assert found.launch_s == 0.0 and found.seconds > 0
