"""accelerate's loop with the engine's Accelerator: the bits of accelerate's own, saved states, refusals."""

from pathlib import Path
from unittest import mock

import accelerate
import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration, set_seed
from distributed.ranks import run
from safetensors.torch import load_file
from sampling import nightly
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LinearLR, OneCycleLR, SequentialLR
from torch.utils.data import DataLoader

import patrickstar as ps
from patrickstar._kernels.grad_norm import GradStats, block_sums, fold
from patrickstar._params.precision import clip_coefficient
from patrickstar.errors import CheckpointError, ConfigError, TrainingError
from patrickstar.integrations import _optimizers
from patrickstar.integrations.accelerate import Accelerator
from patrickstar.testing import assert_same_bits

from .trainers import gpt2, stressed, texts

BUDGET = ps.Config(chunk_size="16KiB", device_memory="2MiB")
STEPS = 20 if nightly() else 5


def groups(model: nn.Module) -> list[dict]:
    """Return groups with and without decay, with rates of their own."""
    params = dict(model.named_parameters())
    decayed = [params[name] for name in params if params[name].ndim > 1]
    return [
        {"params": decayed, "weight_decay": 0.1},
        {"params": [value for value in params.values() if value.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


class Plain(accelerate.Accelerator):
    """accelerate's own Accelerator that adds squares for the norm as the engine does: in fp64, in a fixed order."""

    def clip_grad_norm_(self, parameters, max_norm, norm_type=2):
        grads = [param.grad for param in parameters if param.grad is not None]
        squares = tuple(float(fold(block_sums(grad.flatten()))) for grad in grads)
        total, factor = clip_coefficient(GradStats(squares).norm, max_norm)
        for grad in grads:
            grad.mul_(factor)
        return torch.tensor(total, dtype=torch.float32)


Stressed = stressed(Accelerator)
OPTIMIZERS = {
    "AdamW": lambda model: torch.optim.AdamW(groups(model), lr=1e-2, foreach=False),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.95), foreach=False),
    "SGD": lambda model: torch.optim.SGD(groups(model), lr=0.1, momentum=0.9, foreach=False),
    "RMSprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, foreach=False),
    "AMSGrad": lambda model: torch.optim.AdamW(groups(model), lr=1e-2, amsgrad=True, foreach=False),
}
SCHEDULERS = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 0.9**step),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=1e-2, total_steps=4 * STEPS),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=3), LambdaLR(optimizer, lambda step: 0.9**step)], [3]
    ),
}


@pytest.fixture
def unchanged_classes(monkeypatch):
    """Let torch's classes update one parameter at a time: the kernels of this package round each operation."""
    monkeypatch.setattr(_optimizers, "NATIVE_OPTIMIZERS", {})


def create(kind: type, folder: Path | None = None, **options):
    if issubclass(kind, Accelerator):
        options = {"config": BUDGET} | options
    # Otherwise accelerate does not save the order of a loader's next epochs.
    options["dataloader_config"] = DataLoaderConfiguration(use_seedable_sampler=True)
    project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True) if folder else None
    return kind(cpu=True, project_config=project, gradient_accumulation_steps=2, **options)


def prepared(accelerator, optimizer="AdamW", scheduler="LambdaLR"):
    """Return what accelerate's examples prepare, in their order."""
    set_seed(3)
    model = gpt2()
    chosen = OPTIMIZERS[optimizer](model)
    loader = DataLoader(texts(22), batch_size=4, shuffle=True)
    return accelerator.prepare(model, chosen, loader, SCHEDULERS[scheduler](chosen))


def train(accelerator, model, optimizer, loader, scheduler, steps: int = STEPS, clip: bool = True, epoch: int = 0):
    """Run the loop of accelerate's examples; return losses, norms and learning rates."""
    model.train()
    seen, done = [], 0
    while True:
        loader.set_epoch(epoch)
        epoch += 1
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients and clip:
                    seen.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).clone())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            seen.append(accelerator.gather(loss.detach()).clone())
            done += accelerator.sync_gradients
            if done == steps:
                return seen, [group["lr"] for group in optimizer.param_groups], scheduler.get_last_lr()


def weights(accelerator, model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def ran(kind, *names, **options):
    """Train; return losses and norms, learning rates, parameters, and the engine's optimizer if there is an engine."""
    accelerator = create(kind)
    objects = prepared(accelerator, *names)
    seen, rates, last = train(accelerator, *objects, **options)
    chosen = accelerator.engine.config.optimizer if isinstance(accelerator, Accelerator) else None
    found = seen, (rates, last), weights(accelerator, objects[0]), chosen
    accelerator.free_memory()
    return found


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [
        ("AdamW", "LambdaLR"),
        ("AdamW", "OneCycleLR"),
        ("RMSprop", "SequentialLR"),
        pytest.param("AdamW", "SequentialLR", marks=pytest.mark.slow),
        pytest.param("RMSprop", "LambdaLR", marks=pytest.mark.slow),
        pytest.param("RMSprop", "OneCycleLR", marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_of_accelerate(unchanged_classes, optimizer, scheduler):
    stock = ran(Plain, optimizer, scheduler)
    own = ran(Stressed if scheduler == "LambdaLR" else Accelerator, optimizer, scheduler)
    assert_same_bits(stock[0], own[0], "losses and norms")
    assert stock[1] == own[1]
    assert_same_bits(stock[2], own[2], "parameters")


@pytest.mark.parametrize("optimizer", ["Adam", "SGD", "AMSGrad"])
def test_other_optimizers(unchanged_classes, optimizer):
    stock, own = (ran(kind, optimizer, steps=6, clip=False) for kind in (Plain, Accelerator))
    assert_same_bits(stock[2], own[2], "parameters")


@pytest.mark.parametrize(("optimizer", "kind"), [("Adam", ps.Adam), ("AdamW", ps.AdamW), ("SGD", ps.SGD)])
def test_the_kernels_of_this_package_update(optimizer, kind):
    stock, own = (ran(each, optimizer, steps=6) for each in (Plain, Accelerator))
    assert type(own[3]) is kind
    torch.testing.assert_close(torch.stack(stock[0]), torch.stack(own[0]), atol=1e-5, rtol=1e-4)


def test_a_loaded_state_continues_with_the_same_bits(tmp_path):
    called = []
    accelerator = create(Accelerator, tmp_path)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: called.append((len(models), weights)))
    accelerator.register_load_state_pre_hook(lambda models, folder: called.append(len(models)))
    objects = prepared(accelerator)
    train(accelerator, *objects, steps=6)
    accelerator.save_state()
    saved = tmp_path / "checkpoints" / "checkpoint_0"
    assert not list(saved.glob("model*")) and not list(saved.glob("optimizer*")) and (saved / "patrickstar").is_dir()
    expected = train(accelerator, *objects, steps=5, epoch=4)
    after = weights(accelerator, objects[0])
    accelerator.load_state(str(saved))
    assert called == [(1, []), 1], "other hooks see the model"
    found = train(accelerator, *objects, steps=5, epoch=4)
    assert_same_bits(expected[0], found[0], "losses and norms")
    assert expected[1:] == found[1:]
    assert_same_bits(after, weights(accelerator, objects[0]), "parameters")
    accelerator.free_memory()
    # As after a restart: everything is created anew.
    AcceleratorState._reset_state(reset_partial_state=True)
    again = create(Accelerator, tmp_path)
    objects = prepared(again)
    again.load_state(str(saved))
    assert_same_bits(expected[0], train(again, *objects, steps=5, epoch=4)[0], "losses and norms in a new process")
    with pytest.raises(CheckpointError):
        again.load_state(str(tmp_path))


def test_a_state_replaces_another_once_it_is_complete(tmp_path, monkeypatch):
    accelerator = create(Accelerator)
    objects = prepared(accelerator)
    accelerator.save_state(tmp_path)
    first = weights(accelerator, objects[0])
    train(accelerator, *objects, steps=2)
    with monkeypatch.context() as patch:
        patch.setattr(type(accelerator.engine), "save", mock.Mock(side_effect=CheckpointError("the disk is full")))
        with pytest.raises(CheckpointError):
            accelerator.save_state(tmp_path)
    second = weights(accelerator, objects[0])
    accelerator.load_state(tmp_path)
    assert_same_bits(first, weights(accelerator, objects[0]), "the first state")
    accelerator.engine.load_state_dict(second)
    accelerator.save_state(tmp_path)
    accelerator.save_state(tmp_path)
    assert [path.name for path in tmp_path.glob("patrickstar*")] == ["patrickstar"]
    accelerator.load_state(tmp_path)
    assert_same_bits(second, weights(accelerator, objects[0]), "the newest state")


def test_weights_are_saved_in_full_precision(tmp_path):
    accelerator = create(Accelerator, mixed_precision="bf16")
    assert accelerator.mixed_precision == "bf16"
    objects = prepared(accelerator)
    train(accelerator, *objects, steps=2)
    expected = weights(accelerator, objects[0])
    assert {value.dtype for value in expected.values()} == {torch.float32}
    accelerator.save_model(objects[0], tmp_path / "model", max_shard_size="20KB")
    accelerator.save_model(objects[0], tmp_path / "model")
    files = list((tmp_path / "model").glob("*.safetensors"))
    assert len(files) == 1
    assert_same_bits({name: expected[name] for name in load_file(files[0])}, load_file(files[0]), "safetensors")
    unwrapped = accelerator.unwrap_model(objects[0])
    unwrapped.save_pretrained(tmp_path / "folder", save_function=accelerator.save)
    plain = type(unwrapped).from_pretrained(tmp_path / "folder", dtype=torch.float32)
    assert_same_bits(expected, plain.state_dict(), "loaded by transformers")
    accelerator.free_memory()
    assert all(param.dtype == torch.float32 for param in unwrapped.parameters()), "ordinary tensors again"


def test_steps_that_overflow_do_not_step_the_scheduler():
    accelerator = create(Accelerator, mixed_precision="fp16")
    model, optimizer, loader, scheduler = prepared(accelerator, optimizer="SGD")
    before = scheduler.get_last_lr()
    with accelerator.accumulate(model):
        accelerator.gradient_state._set_sync_gradients(True)
        accelerator.backward(model(**next(iter(loader))).loss * float("inf"))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    assert accelerator.optimizer_step_was_skipped and optimizer.step_was_skipped
    assert scheduler.get_last_lr() == before


def test_the_options_of_an_optimizer_and_a_scheduler_afterwards():
    accelerator = create(Accelerator)
    model, optimizer = accelerator.prepare(gpt2(), ps.AdamW(lr=1e-2))
    scheduler = accelerator.prepare(LambdaLR(optimizer, lambda step: 0.5**step))
    loader = accelerator.prepare(DataLoader(texts(8), batch_size=4))
    assert train(accelerator, model, optimizer, loader, scheduler, steps=2)[1] == [1e-2 / 4]


def test_what_is_refused(monkeypatch):
    with pytest.raises(ConfigError, match="mixed_precision='fp8' is not supported: use 'no', 'bf16', 'fp16'"):
        Accelerator(cpu=True, mixed_precision="fp8")
    with pytest.raises(ConfigError, match=r"selects fp16, and ps\.Config selects bf16"):
        Accelerator(cpu=True, mixed_precision="fp16", config={"precision": "bf16"})
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    accelerator = Accelerator(cpu=True, config={"precision": "bf16"})
    assert accelerator.mixed_precision == "bf16", "of the configuration"
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    assert Accelerator(cpu=True).mixed_precision == "fp16"
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")
    accelerator = create(Accelerator)
    model = gpt2()
    with pytest.raises(TrainingError, match=r"accelerator\.prepare\(model, optimizer\) creates it"):
        accelerator.backward(torch.zeros(1))
    with pytest.raises(ConfigError, match="got 1 models and 0 optimizers: pass one model and its optimizer"):
        accelerator.prepare(model)
    with pytest.raises(ConfigError, match="without its model"):
        accelerator.prepare_optimizer(torch.optim.SGD(model.parameters()))
    other = torch.optim.AdamW(gpt2().parameters())
    with pytest.raises(ConfigError, match=r"of \d+ parameters in group 0 of the AdamW are not parameters of the model"):
        accelerator.prepare(model, other)
    used = torch.optim.AdamW(model.parameters())
    model(**{name: value[None] for name, value in texts(1)[0].items()}).loss.backward()
    used.step()
    with pytest.raises(ConfigError, match=r"has states of \d+ parameters from steps before"):
        accelerator.prepare(model, used)
    accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    with pytest.raises(TrainingError, match="use clip_grad_norm_"):
        accelerator.clip_grad_value_(model.parameters(), 1.0)
    with pytest.raises(ConfigError, match="has prepared a model already"):
        accelerator.prepare(gpt2(), ps.AdamW())


def two_processes(folder: str) -> None:
    """Train, evaluate, save and load in each of two processes."""
    accelerator = create(Accelerator)
    model, optimizer, loader, scheduler = prepared(accelerator)
    train(accelerator, model, optimizer, loader, scheduler, steps=4)
    model.eval()
    with torch.no_grad():
        counts = [accelerator.gather_for_metrics(model(**batch).loss.view(1)).numel() for batch in loader]
    assert len(counts) == 3 and accelerator.num_processes == 2
    accelerator.save_state(folder)
    expected = train(accelerator, model, optimizer, loader, scheduler, steps=3, epoch=4)
    accelerator.load_state(folder)
    found = train(accelerator, model, optimizer, loader, scheduler, steps=3, epoch=4)
    assert_same_bits(expected[0], found[0], "losses")
    accelerator.save_model(model, f"{folder}/model")
    accelerator.wait_for_everyone()
    saved, values = load_file(f"{folder}/model/model.safetensors"), weights(accelerator, model)
    assert_same_bits({name: values[name] for name in saved}, saved, "saved parameters")
    accelerator.free_memory()
    accelerator.end_training()


def test_two_processes(tmp_path):
    run(2, two_processes, 600, folder=str(tmp_path))


def test_muon_of_torch_is_replaced_with_its_groups():
    """Its matrices stay those of Muon, an embedding among them; parameters in no group are not updated."""
    model = torch.nn.Sequential(torch.nn.Embedding(8, 16), torch.nn.Linear(16, 16), torch.nn.Linear(16, 8))
    made = torch.optim.Muon([model[0].weight, model[1].weight], lr=3e-3, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    optimizer = _optimizers.convert(made, model)
    assert isinstance(optimizer, ps.Muon) and (optimizer.momentum, optimizer.adjust_lr_fn) == (0.9, "match_rms_adamw")
    engine, own = ps.initialize(model, ps.Config(device="cpu", precision="fp32", optimizer=optimizer))
    before = engine.state_dict()
    engine.backward(engine(torch.arange(8)).pow(2).sum())
    own.step()
    changed = {name for name, value in engine.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.weight", "1.weight"}
    assert [group["lr"] for group in own.param_groups] == [3e-3]
