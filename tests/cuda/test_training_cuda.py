"""Loops with chunks that move: evaluation, data loaders, errors, accumulation, checkpoints."""

import warnings
from functools import partial

import pytest
import torch
from cuda_cases import DEVICE, budget, check_training, gpt, inputs, layers, make_engine, marks, plain_run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from toys import outcome, train

import patrickstar as ps
from patrickstar import testing
from patrickstar.testing import assert_exact, assert_same_bits, compare

pytestmark = marks

OPTIONS = dict(device=str(DEVICE), chunk_size="128KiB", host_memory="64MiB")


def test_data_loaders_whose_workers_are_forked():
    """Workers are forked while host memory is locked and chunks are copied, and inherit neither."""

    def run(engine, batches):
        losses, data = [], TensorDataset(torch.cat([values for (values,) in batches]))
        for _ in range(2):
            with warnings.catch_warnings():  # the warning of Python about forks of a process with threads
                warnings.simplefilter("ignore", DeprecationWarning)
                loader = iter(DataLoader(data, batch_size=32, num_workers=2, multiprocessing_context="fork"))
                loaded = [next(loader) for _ in range(3)]
            losses += train(engine, batches[3:] if losses else loaded)
            del loader
        return losses

    check_training(ps.Config(**OPTIONS), "1536KiB", 6, run=run)


OPTIMIZERS = {
    "Muon": ps.Muon(lr=1e-2, ns_steps=2),
    "schedule-free": ps.ScheduleFreeAdamW(lr=1e-2),
    "8-bit": ps.AdamW8bit(lr=1e-2),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("room", ["2560KiB", "64MiB"], ids=["states on the host", "states on the device"])
def test_optimizers(optimizer, room):
    """Muon multiplies matrices on the device, wherever its states are."""
    check_training(ps.Config(**OPTIONS, optimizer=optimizer), room, 3)


def test_evaluation_between_steps():
    """Evaluate with no_grad and inference_mode, which fetch chunks on demand."""

    def run(engine, batches):
        results, outputs = [], []
        for step, batch in enumerate(batches):
            results += train(engine, [batch])
            engine.eval()
            with torch.no_grad() if step % 2 else torch.inference_mode():
                outputs.append(engine(*inputs(1, seed=9)[0]).cpu())
                assert torch.equal(outputs[-1], engine(*inputs(1, seed=9)[0]).cpu())
            engine.train()
        assert not torch.equal(outputs[0], outputs[-1])
        return results

    check_training(ps.Config(**OPTIONS), "1536KiB", 4, run=run)


def test_text_is_generated_between_steps():
    ids = torch.randint(0, 128, (2, 8), generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def script(trainer, optimizer):
        seen = []
        for _ in range(3):
            loss = trainer(input_ids=ids, labels=ids).loss
            trainer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                seen.append(trainer.module.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0))
        return seen

    compare(gpt(False), ps.Config(device=str(DEVICE), device_memory="1GiB", chunk_size=4096), script)


def test_accumulation_with_states_on_the_host():
    config = ps.Config(**OPTIONS, device_memory="1280KiB")
    assert_exact(layers, inputs(6), config, accumulation=2, stress=False)


class Breaks(torch.autograd.Function):
    """Identity whose backward fails once."""

    fails = False

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if Breaks.fails:
            Breaks.fails = False
            raise RuntimeError("made to fail")
        return grad


class Breaking(nn.Module):
    """Layers with a failing function between them."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = layers(count=4), layers(count=4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after(Breaks.apply(self.before(x)))


def test_training_can_continue_after_an_error_in_backward():
    """The error is raised in the autograd thread of the device. Gradients computed before it are dropped."""

    def run(engine, batches):
        found = train(engine, batches[:2])
        Breaks.fails = True
        loss = engine(*inputs(1, seed=7)[0]).float().pow(2).mean()
        with pytest.raises(RuntimeError, match="made to fail"):
            engine.backward(loss)
        del loss
        engine.optimizer.zero_grad()
        return found + train(engine, batches[2:])

    check_training(ps.Config(**OPTIONS), "1536KiB", 4, Breaking, run)


def test_a_default_device(tmp_path):
    """Steps, saving and loading use the host where they must, whatever the default device."""
    expected = plain_run(ps.Config(**OPTIONS), 3)
    torch.manual_seed(0)
    module = layers()  # on the host: a GPU draws other numbers from the same seed
    memory = budget("1536KiB")
    torch.set_default_device(DEVICE)
    try:
        engine = make_engine(lambda: module, ps.Config(**OPTIONS, device_memory=memory))
        found = train(engine, inputs(2))
        engine.save(tmp_path / "checkpoint")
        engine.load(tmp_path / "checkpoint")
        found += train(engine, inputs(3)[2:])
        found += outcome(engine)
        engine.close()
    finally:
        torch.set_default_device(None)
    assert_same_bits(expected, found, "results of training")


SHAPES = [(64, 96), (100, 36), (72, 200), (256, 8), (33, 65), (128, 1000)]


class Uneven(nn.Module):
    """Layers of sizes at which parameters would start at any address."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*shape) for shape in SHAPES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(layer(x[:, : layer.in_features]).float().pow(2).mean() for layer in self.layers)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_layers_of_any_size_have_the_bits_of_plain_pytorch(precision):
    """cuBLAS chooses kernels by the alignment of operands, up to 256 bytes. Plain tensors are aligned to 512 bytes."""
    config = ps.Config(device=str(DEVICE), device_memory="1GiB", chunk_size="64KiB", precision=precision)
    assert_exact(Uneven, inputs(3), config, loss_fn=lambda out, _: out, stress=False)


# Checkpoints, with dropout, and states on the device, the host or the disk


build = partial(layers, count=12, dropout=0.1)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    ("tier", "wait"),
    [
        *(("device", True), pytest.param("device", False, marks=pytest.mark.slow)),
        *(pytest.param("host", True, marks=pytest.mark.slow), ("host", False)),
        *(("disk", True), ("disk", False)),
    ],
)
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(tmp_path, tier, precision, wait):
    """The parameters take 1.5 MiB in 16 bits and the states 9 MiB, so that the smaller budgets hold no states."""
    options = dict(device=str(DEVICE), precision=precision, chunk_size="512KiB")
    small = budget("4MiB", ps.Config(**options).compute_dtype)
    budgets = {
        "device": {"device_memory": "1GiB"},
        "host": {"device_memory": small},
        "disk": {"device_memory": small, "host_memory": "64MiB", "disk": ps.Disk(tmp_path)},
    }[tier]
    engine = make_engine(build, ps.Config(**options, **budgets))
    train(engine, inputs(3, rows=8))
    engine.save(tmp_path / "checkpoint", wait=wait)
    expected = train(engine, inputs(2, rows=8, seed=2)) + outcome(engine)
    engine.close()
    resumed = make_engine(build, ps.Config(**options, device_memory="1GiB"))
    torch.manual_seed(5)
    resumed.load(tmp_path / "checkpoint")
    testing.assert_same_bits(
        expected, train(resumed, inputs(2, rows=8, seed=2)) + outcome(resumed), "results after the resume"
    )
    resumed.close()
