"""Lightning Fabric with the engine as strategy: results equal those of its own strategy."""

import subprocess
import sys
from typing import Any

import lightning
import pytest
import torch
from torch import nn

from patrickstar.errors import CheckpointError, ConfigError, TrainingError
from patrickstar.integrations.lightning import PatrickStarFabricStrategy
from patrickstar.testing import assert_same_bits

from .trainers import stressed

Stressed = stressed(PatrickStarFabricStrategy)
WIDTH = 16
pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning warns by ordinary warnings


def net() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh()) for _ in range(4))
    return nn.Sequential(*blocks)


def batches(seed: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randn(2, WIDTH, generator=generator) for _ in range(2)) for _ in range(count)]


def fabric(strategy: Any, **options: Any) -> lightning.Fabric:
    made = lightning.Fabric(**{"accelerator": "cpu", "devices": 1, "strategy": strategy} | options)
    made.launch()
    return made


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)


class Run:
    """Training loop of a script: accumulation over two batches, clipping without effect, a scheduler."""

    def __init__(self, strategy: Any, before: bool = True, **options: Any) -> None:
        self.fabric, module = fabric(strategy, **options), net()
        given = optimizer(module)
        if before:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(given, 20)
            self.model, self.optimizer, self.scheduler = self.fabric.setup(module, given, scheduler=scheduler)
        else:
            self.model, self.optimizer = self.fabric.setup(module, given)
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 20)
        self.step = 0
        self.losses: list[float] = []
        self.norms: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "step": self.step}

    def train(self, steps: int) -> "Run":
        data = batches(1, 2 * (self.step + steps))
        while self.step < len(data) // 2:
            for number in range(2):
                inputs, targets = data[2 * self.step + number]
                with self.fabric.no_backward_sync(self.model, enabled=number == 0):
                    loss = (self.model(inputs) - targets).float().pow(2).mean()
                    self.fabric.backward(loss / 2)
                self.losses.append(loss.item())
            norm = self.fabric.clip_gradients(self.model, self.optimizer, max_norm=100.0)
            self.norms.append(float(norm))
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.step += 1
        return self

    def values(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def evaluate(self) -> torch.Tensor:
        self.model.eval()
        with torch.no_grad():
            return torch.stack([self.model(inputs) for inputs, _ in batches(2, 3)])


@pytest.mark.parametrize("before", [True, False], ids=["scheduler before", "scheduler after"])
def test_bits_of_its_own_strategy(before):
    own = Run("auto", before).train(20)
    stressed = Run(Stressed({"chunk_size": 2048}), before).train(20)
    assert stressed.losses == own.losses and len(own.losses) == 40
    assert stressed.norms == pytest.approx(own.norms, rel=1e-6)
    assert stressed.optimizer.param_groups[0]["lr"] == own.optimizer.param_groups[0]["lr"] < 1e-2
    assert_same_bits(own.values(), stressed.values(), "parameters")
    assert torch.equal(own.evaluate(), stressed.evaluate())


def test_a_run_resumes_with_the_same_bits(tmp_path):
    whole = Run(Stressed()).train(8)
    saving = Run(Stressed()).train(3)
    for _ in range(2):  # the second replaces the first
        saving.fabric.save(tmp_path / "saved", saving.state)
    assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    assert sorted(each.name for each in (tmp_path / "saved").iterdir()) == ["lightning.ckpt", "patrickstar"]
    resumed = Run(Stressed())
    state = resumed.state
    assert resumed.fabric.load(tmp_path / "saved", state) == {}
    resumed.step = state["step"]
    resumed.train(5)
    assert saving.losses + resumed.losses == whole.losses
    assert_same_bits(whole.values(), resumed.values(), "parameters")


def test_weights_alone_are_a_file(tmp_path):
    run, path = Run(PatrickStarFabricStrategy()).train(3), tmp_path / "weights.ckpt"
    run.fabric.save(path, {"model": run.model, "step": 3}, filter={"model": lambda name, value: "bias" in name})
    assert len(torch.load(path)["model"]) == 4
    run.fabric.save(path, {"model": run.model, "step": 3})
    evaluation = fabric(PatrickStarFabricStrategy())
    model = evaluation.setup(net())
    assert evaluation.load(path, {"model": model}) == {"step": 3}
    with torch.no_grad():
        again = torch.stack([model.eval()(inputs) for inputs, _ in batches(2, 3)])
    assert torch.equal(again, run.evaluate())
    assert not any(each.trained for each in evaluation.strategy.engine.inspect().parameters)
    own = fabric("auto")
    plain = own.setup(net())
    own.load(path, {"model": plain})
    assert_same_bits(run.values(), plain.state_dict(), "parameters")


def test_a_file_of_another_strategy_resumes(tmp_path):
    own = Run("auto").train(3)
    own.fabric.save(tmp_path / "own.ckpt", own.state)
    resumed = Run(Stressed())
    resumed.fabric.load(tmp_path / "own.ckpt", resumed.state)
    resumed.step = 3
    torch.manual_seed(1)
    own.train(3)
    torch.manual_seed(1)
    resumed.train(3)
    assert_same_bits(own.values(), resumed.values(), "parameters")


def test_a_model_is_set_up_again(tmp_path):
    found = []
    for kind in ("auto", "stressed"):
        module, losses = net(), []
        for number in range(2):
            made = fabric("auto" if kind == "auto" else Stressed())
            model = made.setup(module)
            with torch.no_grad():
                losses.append(model(batches(3, 1)[0][0]).sum().item())
            if kind == "stressed":
                made = fabric(Stressed())  # takes the module over from the evaluation before
            else:
                model = module
            model, own = made.setup(module, optimizer(module))
            for inputs, targets in batches(number, 3):
                loss = (model(inputs) - targets).pow(2).mean()
                made.backward(loss)
                own.step()
                own.zero_grad()
                losses.append(loss.item())
        found.append((losses, {name: value.detach().clone() for name, value in module.state_dict().items()}))
    assert found[0][0] == found[1][0]
    assert_same_bits(found[0][1], found[1][1], "parameters")


def test_precision_is_the_engines():
    run = Run(PatrickStarFabricStrategy(), precision="bf16-mixed")
    assert run.model(batches(1, 1)[0][0]).dtype is torch.float32
    own = Run("auto")
    for each in (run, own):
        each.model.eval()  # dropout draws other numbers in another precision
        each.train(5)
    assert run.fabric.strategy.engine.config.precision == "bf16"
    assert run.losses == pytest.approx(own.losses, rel=0.05)


class Stepping(nn.Sequential):
    def training_step(self, inputs: torch.Tensor) -> torch.Tensor:
        return self(inputs).pow(2).mean()


def test_methods_of_the_module_run_in_the_engine():
    module, made = Stepping(*net()), fabric(Stressed())
    model, own = made.setup(module, optimizer(module))
    made.backward(model.training_step(batches(1, 1)[0][0]))
    own.step()
    assert made.strategy.engine.stats.total.steps == 1


def test_mistakes(tmp_path):
    module, made = net(), fabric(PatrickStarFabricStrategy())
    given = optimizer(module)
    with pytest.raises(TrainingError, match=r"there is no engine yet: fabric.setup\(model, optimizer\)"):
        made.strategy.engine  # noqa: B018
    with pytest.raises(ConfigError, match=r"fabric.setup got 2 optimizers"):
        made.setup(module, given, given)
    with pytest.raises(ConfigError, match="without its model"):
        made.setup_optimizers(given)
    torch.optim.lr_scheduler.ConstantLR(given)
    with pytest.raises(ConfigError, match="a scheduler was created from the RMSprop before"):
        made.setup(module, given)
    with pytest.raises(ConfigError, match=r"Fabric\(precision=...\) selects fp32, and ps.Config selects bf16"):
        fabric(PatrickStarFabricStrategy({"precision": "bf16"})).setup(net())
    with pytest.raises(ConfigError, match=r"precision='64-true' is not supported"):
        fabric(PatrickStarFabricStrategy(), precision="64-true")
    run = Run(PatrickStarFabricStrategy())
    with pytest.raises(ConfigError, match="the engine of this Fabric manages a Sequential"):
        run.fabric.setup(nn.Linear(1, 1))
    loss = run.model(torch.ones(1, WIDTH)).sum()
    with pytest.raises(RuntimeError, match=r"call `fabric.backward\(loss\)`"):
        loss.backward()
    run.fabric.backward(loss)
    with pytest.raises(TrainingError, match=r"clip_val=...\) is not supported"):
        run.fabric.clip_gradients(run.model, run.optimizer, clip_val=1.0)
    run.optimizer.step()
    with pytest.raises(CheckpointError, match="without the model"):
        run.fabric.save(tmp_path / "saved", {"optimizer": run.optimizer})
    with pytest.raises(CheckpointError, match="can't filter"):
        run.fabric.save(tmp_path / "saved", run.state, filter={"model": lambda name, value: True})
    run.fabric.save(tmp_path / "saved", run.state)
    for state in (None, {"model": run.model}):
        with pytest.raises(CheckpointError, match="load model and optimizer together"):
            run.fabric.load(tmp_path / "saved", state)
    with pytest.raises(KeyError, match="'epoch'"):
        run.fabric.load(tmp_path / "saved", run.state | {"epoch": 0})
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="is no checkpoint of this strategy"):
        run.fabric.load(tmp_path / "empty", run.state)


PROCESSES = """
import sys, lightning, torch
from patrickstar.integrations.lightning import PatrickStarFabricStrategy

def loop():
    strategy = "ddp" if sys.argv[1] == "ddp" else PatrickStarFabricStrategy({"chunk_size": 2048})
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(4)))
    optimizer = torch.optim.RMSprop(module.parameters(), lr=1e-3, foreach=False)
    model, optimizer = fabric.setup(module, optimizer)
    data = torch.utils.data.TensorDataset(torch.randn(40, 16, generator=torch.Generator().manual_seed(1)))
    loader = fabric.setup_dataloaders(torch.utils.data.DataLoader(data, batch_size=2))
    assert len(loader) == 10 and fabric.world_size == 2
    state = {"model": model, "optimizer": optimizer, "step": 0}
    for number, (inputs,) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=number % 2 == 0):
            loss = model(inputs).pow(2).mean()
            fabric.backward(loss)
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        if number == 5 and sys.argv[1] != "ddp":
            state["step"] = number
            fabric.save(sys.argv[2], state)
            fabric.load(sys.argv[2], state)
        total = fabric.all_reduce(loss.detach(), reduce_op="sum")
    assert fabric.broadcast(fabric.global_rank, src=1) == 1
    fabric.barrier()
    fabric.save(f"{sys.argv[2]}.{sys.argv[1]}", {"model": model, "total": total})

loop()
"""


@pytest.mark.slow
def test_two_processes_have_the_bits_of_ddp(tmp_path):
    (tmp_path / "script.py").write_text(PROCESSES)
    found = []
    for kind in ("ddp", "engine"):
        command = [sys.executable, str(tmp_path / "script.py"), kind, str(tmp_path / "saved")]
        run = subprocess.run(command, capture_output=True, text=True, timeout=900)
        assert run.returncode == 0, run.stdout + run.stderr
        found.append(torch.load(tmp_path / f"saved.{kind}"))
    assert torch.equal(found[0]["total"], found[1]["total"])
    assert_same_bits(found[0]["model"], found[1]["model"], "parameters")
