"""Lightning's Trainer with the engine as strategy: results equal those of its own strategy, with an engine, too."""

import copy
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import patrickstar as ps
from patrickstar.errors import BudgetError, CheckpointError, ConfigError, TrainingError
from patrickstar.integrations.lightning import PatrickStarStrategy, StoredWeights

from .trainers import stressed

Stressed = stressed(PatrickStarStrategy)
WIDTH = 16
# Lightning warns by ordinary warnings, of data loaders without workers among others.
pytestmark = pytest.mark.filterwarnings("ignore")


class Net(lightning.LightningModule):
    """Regression with a schedule; `manual`: with its own loop over optimizer steps."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.automatic_optimization = not manual
        self.losses: list[float] = []

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)

    def training_step(self, batch: Any, number: int) -> torch.Tensor:
        inputs, targets = batch
        loss = (self(inputs) - targets).float().pow(2).mean()
        self.log("loss", loss)
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=100.0, gradient_clip_algorithm="norm")
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, batch: Any, number: int) -> None:
        self.log("validation", (self(batch[0]) - batch[1]).float().pow(2).mean())

    test_step = validation_step

    def predict_step(self, batch: Any, number: int) -> torch.Tensor:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.RMSprop(self.parameters(), lr=1e-2, momentum=0.9, foreach=False)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loader(seed: int = 0, count: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randn(count, WIDTH, generator=generator) for _ in range(2))
    return DataLoader(TensorDataset(inputs, targets), batch_size=2)


def trainer(strategy: Any, folder: Any, **options: Any) -> lightning.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(
        **{"accelerator": "cpu", "devices": 1, "strategy": strategy, "default_root_dir": folder, "max_epochs": 1}
        | quiet
        | {"enable_checkpointing": False}
        | options
    )


def values(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_bits_of_its_own_strategy(tmp_path, manual):
    """Compare 20 steps with accumulation, clipping, a scheduler and validation."""
    found = []
    for strategy in ("auto", Stressed({"chunk_size": 2048})):
        module = Net(manual)
        options = {} if manual else {"accumulate_grad_batches": 2, "gradient_clip_val": 100.0}
        run = trainer(strategy, tmp_path, max_epochs=2, **options)
        run.fit(module, loader(), loader(1, 8))
        predicted = torch.cat(run.predict(module, loader(2, 6)))
        found.append((module.losses, run.callback_metrics, values(module), [predicted]))
    (losses, metrics, state, predicted), (own_losses, own_metrics, own_state, own_predicted) = found
    assert losses == own_losses and len(losses) == 40
    assert {key: value.item() for key, value in metrics.items()} == {k: v.item() for k, v in own_metrics.items()}
    ps.testing.assert_same_bits(state, own_state, "parameters")
    ps.testing.assert_same_bits(predicted, own_predicted, "predictions")


def test_evaluations_run_in_evaluation_mode(tmp_path):
    """Compare metrics of a module with dropout, and the mode of each call."""
    found = []
    for strategy in ("auto", Stressed({"chunk_size": 2048})):
        module, modes = Net(), []
        module.layers.append(nn.Dropout(0.5))
        module.layers.register_forward_pre_hook(lambda layers, inputs, modes=modes: modes.append(layers.training))
        run, metrics = trainer(strategy, tmp_path, num_sanity_val_steps=0, val_check_interval=8), []
        run.fit(module, loader(), loader(1, 8))
        for evaluate in (run.validate, run.test):
            metrics += evaluate(module, loader(1, 8), verbose=False)
        found.append((modes, module.losses, metrics))
    assert found[1] == found[0]
    assert found[0][0] == 2 * (8 * [True] + 4 * [False]) + 4 * [True] + 8 * [False]


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
@pytest.mark.parametrize("trainers", ["one", "several"])
def test_a_module_is_fitted_again(tmp_path, manual, trainers):
    """Validate, fit twice and test; another Trainer takes the module over from the one before."""
    found = []
    for kind in ("auto", "stressed"):
        module, results = Net(manual), []
        for number in range(2):
            if number == 0 or trainers == "several":
                strategy = "auto" if kind == "auto" else Stressed({"chunk_size": 2048})
                run = trainer(strategy, tmp_path, max_epochs=1)
            run.fit_loop.max_epochs = number + 1 if trainers == "one" else 1
            results += run.validate(module, loader(1, 8), verbose=False)
            run.fit(module, loader(number, 10))
            results += run.test(module, loader(1, 8), verbose=False)
        if kind == "stressed":
            copy.deepcopy(module)
            run.strategy.engine.close()
            module.train()(torch.zeros(1, WIDTH)).sum().backward()  # the module is an ordinary one
            assert all(type(param.grad) is torch.Tensor for param in module.parameters())
        found.append((module.losses, results, values(module)))
    (losses, results, state), (own_losses, own_results, own_state) = found
    assert losses == own_losses and len(losses) == 10
    assert results == own_results
    ps.testing.assert_same_bits(state, own_state, "parameters")


def test_a_run_resumes_with_the_same_bits(tmp_path):
    whole, part = Net(), Net()
    trainer(Stressed(), tmp_path, max_epochs=2, accumulate_grad_batches=2).fit(whole, loader())

    def saving(epochs: int) -> lightning.Trainer:
        callback = ModelCheckpoint(tmp_path / "saved", save_last=True, save_top_k=-1, every_n_train_steps=5)
        options = {"enable_checkpointing": True, "callbacks": [callback], "accumulate_grad_batches": 2}
        return trainer(Stressed(), tmp_path, max_epochs=epochs, **options)

    saving(1).fit(part, loader())
    last = tmp_path / "saved" / "last.ckpt"
    assert (last / "patrickstar").is_dir() and len(list((tmp_path / "saved").iterdir())) == 3
    resumed = Net()
    saving(2).fit(resumed, loader(), ckpt_path=str(last))
    assert len(list((tmp_path / "saved").iterdir())) == 5  # none between the first micro-batches
    ps.testing.assert_same_bits(values(whole), values(resumed), "parameters")
    assert part.losses + resumed.losses == whole.losses


def test_the_best_checkpoint_is_evaluated(tmp_path):
    """Compare with Lightning's own strategy. A frozen parameter is part of a checkpoint, too."""
    found = []
    for strategy in ("auto", Stressed({"chunk_size": 2048})):
        module, folder = Net(), tmp_path / str(len(found))
        module.layers[0][0].weight.requires_grad_(False)
        best = ModelCheckpoint(folder, monitor="validation", save_top_k=-1, every_n_train_steps=5)
        options = {"enable_checkpointing": True, "callbacks": [best], "val_check_interval": 5}
        run = trainer(strategy, tmp_path, **options)
        run.fit(module, loader(), loader(1, 8))
        assert {float(score) for score in best.best_k_models.values()} != {best.best_model_score.item()}
        other = Net()
        nn.init.zeros_(other.layers[0][0].weight)
        results = [run.test(dataloaders=loader(1, 8), verbose=False)]
        again = trainer("auto" if strategy == "auto" else Stressed(), tmp_path)
        results.append(again.validate(other, loader(1, 8), ckpt_path=best.best_model_path, verbose=False))
        found.append((results, best.best_model_score.item()))
    plain = Net()
    plain.load_state_dict(StoredWeights(best.best_model_path))
    assert trainer("auto", tmp_path).test(plain, loader(1, 8), verbose=False) == found[0][0][0]
    assert found[0] == found[1]
    assert found[0][0][0][0]["validation"] == found[0][1]
    larger = Net()
    larger.scale = nn.Parameter(torch.ones(()))
    with pytest.raises(
        CheckpointError, match=r"another model: it lacks 1 entries of the state dict, the first is 'scale'"
    ):
        again.validate(larger, loader(1, 8), ckpt_path=best.best_model_path, verbose=False)


def test_weights_alone_are_a_file_of_lightning(tmp_path):
    module, path = Net(), tmp_path / "weights.ckpt"
    run = trainer(PatrickStarStrategy(), tmp_path, max_steps=3)
    run.fit(module, loader())
    run.save_checkpoint(path, weights_only=True)
    loaded = Net.load_from_checkpoint(path)
    ps.testing.assert_same_bits(values(module), values(loaded), "parameters")
    before = run.validate(module, loader(1, 8), verbose=False)
    again = trainer(PatrickStarStrategy(), tmp_path)
    assert again.validate(Net(), loader(1, 8), ckpt_path=str(path), verbose=False) == before
    assert not any(each.trained for each in again.strategy.engine.inspect().parameters)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_precision_is_the_engines(tmp_path, precision):
    run, module = trainer(PatrickStarStrategy(), tmp_path, precision=precision, max_epochs=5), Net()
    run.fit(module, loader())
    assert run.strategy.engine.config.precision == "bf16"
    assert sum(module.losses[-20:]) < sum(module.losses[:20])
    assert {value.dtype for value in module.state_dict().values()} == {torch.float32}


class OwnBackward(Net):
    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


class OwnOptimizer(Net):
    """Module that has its optimizer and scheduler before a fit."""

    def __init__(self) -> None:
        super().__init__()
        self.configured = super().configure_optimizers()

    def configure_optimizers(self) -> Any:
        return self.configured


def test_states_of_an_optimizer_end_with_the_engine(tmp_path):
    """An optimizer that hasn't trained is taken again, one that has is refused, with its scheduler as before."""
    module = OwnOptimizer()
    with pytest.raises(BudgetError):
        trainer(Stressed({"device_memory": 512}), tmp_path).fit(module, loader())
    trainer(Stressed(), tmp_path, max_steps=0).fit(module, loader())
    run = trainer(Stressed(), tmp_path, max_steps=2)
    run.fit(module, loader())
    own = Net()
    trainer("auto", tmp_path, max_steps=2).fit(own, loader())
    assert module.losses == own.losses and len(own.losses) == 2
    with pytest.raises(ConfigError, match="the RMSprop has trained before, and its states ended with that engine"):
        run.fit(module, loader())
    assert module.configured["lr_scheduler"]["scheduler"].optimizer is module.configured["optimizer"]


def test_mistakes(tmp_path):
    two, none = Net(manual=True), Net()
    two.configure_optimizers = lambda: ([torch.optim.SGD(layer.parameters(), lr=0.1) for layer in two.layers[:2]], [])
    none.configure_optimizers = lambda: None
    for module, message in (
        (two, "returned 2 optimizers, and an engine has one"),
        (none, "returned no optimizer: return the one that trains"),
        (OwnBackward(), r"OwnBackward.backward is not called"),
    ):
        with pytest.raises(ConfigError, match=message):
            trainer(PatrickStarStrategy(), tmp_path).fit(module, loader())
    with pytest.raises(ConfigError, match=r"precision='64-true' is not supported: use '32-true'"):
        trainer(PatrickStarStrategy(), tmp_path, precision="64-true")
    with pytest.raises(ConfigError, match=r"Trainer\(precision=...\) selects fp32, and ps.Config selects bf16"):
        trainer(PatrickStarStrategy({"precision": "bf16"}), tmp_path).fit(Net(), loader())
    with pytest.raises(TrainingError, match="'value' is not supported"):
        run = trainer(PatrickStarStrategy(), tmp_path, gradient_clip_val=1.0, gradient_clip_algorithm="value")
        run.fit(Net(), loader())
    with pytest.raises(TrainingError, match="there is no engine yet"):
        PatrickStarStrategy().engine  # noqa: B018
    (tmp_path / "empty.ckpt").mkdir()
    with pytest.raises(CheckpointError, match="is no checkpoint of this strategy"):
        trainer(PatrickStarStrategy(), tmp_path).fit(Net(), loader(), ckpt_path=str(tmp_path / "empty.ckpt"))


class Untouched(lightning.LightningModule):
    """Module of Lightning's own strategy, which knows nothing of the engine that trains its layers."""

    def __init__(self, precision: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
        self.config = ps.Config(device="cpu", precision=precision, optimizer=ps.AdamW(lr=1e-2))

    @property
    def engine(self) -> ps.Engine:
        return self.__dict__["made"]

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return self.engine(batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        self.__dict__["made"], optimizer = ps.initialize(self.layers, self.config)
        return optimizer


@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.slow)])
def test_lightning_resumes_exactly(precision, tmp_path):
    inputs = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0))
    data = DataLoader(inputs, batch_size=None)
    whole, first, second = (Untouched(precision) for _ in range(3))
    trainer("auto", tmp_path, max_epochs=3).fit(whole, data)
    stopped = trainer("auto", tmp_path)
    stopped.fit(first, data)
    stopped.save_checkpoint(tmp_path / "one.ckpt")
    trainer("auto", tmp_path, max_epochs=3).fit(second, data, ckpt_path=tmp_path / "one.ckpt", weights_only=False)
    states = [
        model.engine.state_dict() | {"moments": model.engine.optimizer.state_dict()["state"][0]["exp_avg"]}
        for model in (whole, second)
    ]
    ps.testing.assert_same_bits(*states, "the resumed run")
