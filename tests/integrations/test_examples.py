"""The examples run unchanged for a few steps."""

import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from distributed import ranks
from sampling import nightly

EXAMPLES = Path(__file__).parents[2] / "examples"


def main_of(example: str, kind: str = "", **smaller: Any) -> Any:
    """Return the function of an example that the command line calls.

    `make test` replaces sizes in the configuration `kind` of transformers by smaller ones.
    """
    with pytest.MonkeyPatch.context() as patch:
        if kind and not nightly():
            config = getattr(transformers, kind)
            patch.setattr(transformers, kind, lambda **sizes: config(**sizes | smaller))
        return runpy.run_path(str(EXAMPLES / f"{example}.py"))["main"]


def test_larger_than_budget(one_thread, capsys):
    main = main_of("larger_than_budget")
    steps, most = (4, 8) if nightly() else (2, 12)
    loss, model_bytes, peak_bytes = main(steps)
    budget_bytes = 48 << 20
    assert loss < most and 0 < peak_bytes <= budget_bytes < model_bytes / 5
    assert "device budget 48.0 MiB, peak" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_trainer(tmp_path, one_thread):
    main = main_of("trainer", "GPT2Config", n_layer=2, n_embd=192)
    options = ["--output", str(tmp_path), "--device-memory", "1GiB"]
    first = main([*options, "--steps", "1"])
    assert main([*options, "--steps", "2", "--resume"]) < first < 6
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "checkpoint-2").is_dir()


def test_accelerate_loop(tmp_path, one_thread):
    main = main_of("accelerate_loop", "GPT2Config", n_layer=2, n_embd=192)
    options = ["--save", str(tmp_path / "state"), "--device-memory", "1GiB"]
    first = main([*options, "--steps", "2"])
    (again,) = main([*options, "--steps", "1", "--resume"])
    assert again < first[0] < 6
    assert (tmp_path / "state" / "patrickstar").is_dir()


@pytest.mark.filterwarnings("ignore")  # Lightning warns of data loaders without workers, and of folders that exist
def test_lightning(tmp_path, one_thread):
    main = main_of("lightning_fit", "GPT2Config", n_layer=2, n_embd=192)
    options = ["--output", str(tmp_path), "--device-memory", "1GiB"]
    assert main([*options, "--steps", "1"]) < 6
    assert (tmp_path / "last.ckpt" / "patrickstar").is_dir()


@pytest.mark.slow
def test_lightning_with_two_processes(tmp_path):
    command = [sys.executable, EXAMPLES / "lightning_fit.py", "--output", tmp_path, "--steps", "2", "--devices", "2"]
    run = subprocess.run([*map(str, command), "--device-memory", "1GiB"], capture_output=True, text=True, timeout=900)
    assert run.returncode == 0 and "peak of model data" in run.stdout, run.stdout + run.stderr
    assert (tmp_path / "last.ckpt" / "patrickstar").is_dir()


@pytest.mark.filterwarnings("ignore:.* is deprecated and will be removed in v6:FutureWarning")
def test_dpo(tmp_path, one_thread, capsys):
    main = main_of("dpo")
    margin = main(["--output", str(tmp_path), "--device-memory", "1GiB", "--steps", "2"])
    assert -5 < margin < 5 and "10,697,088 parameters of the reference model in chunks" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_trainer_with_adapters(tmp_path, one_thread):
    main = main_of("trainer")
    assert main(["--output", str(tmp_path), "--device-memory", "1GiB", "--steps", "1", "--lora"]) < 6
    assert (tmp_path / "adapter_model.safetensors").is_file()


def experts(words: list[str], steps: int) -> None:
    """Run the example in each of four processes."""
    budget_mib = 32
    options = ["--steps", str(steps), "--device-memory", f"{budget_mib}MiB", *words]
    losses, peak_bytes = main_of("experts", "MixtralConfig", num_hidden_layers=2)(options)
    assert len(losses) == steps and losses[-1] < (0.9 if steps > 4 else 1) * losses[0]
    assert 0 < peak_bytes <= budget_mib << 20


@pytest.mark.long("an example in four processes")
@pytest.mark.parametrize("words", [pytest.param([], marks=pytest.mark.slow), ["--tp", "2", "--ep", "4"]])
def test_experts(words):
    steps = 6 if nightly() else 3
    first, *others = ranks.run(4, experts, words=words, steps=steps)
    assert f"step {steps}: loss" in first.text and "of model data and a budget of 32MiB" in first.text
    assert not any(ended.text for ended in others), "rank 0 alone prints"


def digest(folder: Path, *options: str) -> str:
    """Return the digest of the parameters that the example prints."""
    command = [sys.executable, str(EXAMPLES / "ray_train.py"), "--folder", str(folder), "--steps", "12", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0 and "  parameters " in run.stdout, run.stdout + run.stderr
    return run.stdout.split("  parameters ")[1].split()[0]


@pytest.mark.slow
def test_a_failed_worker_of_ray_changes_no_bit(tmp_path):
    """Train in two workers, and resume after one has ended."""
    pytest.importorskip("ray", reason="ray is not installed: pip install '.[ray]'")
    whole = digest(tmp_path / "whole")
    assert digest(tmp_path / "failed", "--fail-after", "7") == whole
