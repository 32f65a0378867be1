"""The examples run unchanged for a few steps."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from sampling import nightly

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_larger_than_budget(one_thread, capsys):
    main = runpy.run_path(str(EXAMPLES / "larger_than_budget.py"))["main"]
    steps, most = (4, 8) if nightly() else (2, 12)
    loss, model_bytes, peak_bytes = main(steps)
    budget_bytes = 48 << 20
    assert loss < most and 0 < peak_bytes <= budget_bytes < model_bytes / 5
    assert "device budget 48.0 MiB, peak" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_trainer(tmp_path, one_thread):
    main = runpy.run_path(str(EXAMPLES / "trainer.py"))["main"]
    options = ["--output", str(tmp_path), "--device-memory", "1GiB"]
    first = main([*options, "--steps", "1"])
    assert main([*options, "--steps", "2", "--resume"]) < first < 6
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "checkpoint-2").is_dir()


def test_accelerate_loop(tmp_path, one_thread):
    main = runpy.run_path(str(EXAMPLES / "accelerate_loop.py"))["main"]
    options = ["--save", str(tmp_path / "state"), "--device-memory", "1GiB"]
    first = main([*options, "--steps", "2"])
    (again,) = main([*options, "--steps", "1", "--resume"])
    assert again < first[0] < 6
    assert (tmp_path / "state" / "patrickstar").is_dir()


@pytest.mark.filterwarnings("ignore")  # Lightning warns of data loaders without workers, and of folders that exist
def test_lightning(tmp_path, one_thread):
    main = runpy.run_path(str(EXAMPLES / "lightning_fit.py"))["main"]
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
    main = runpy.run_path(str(EXAMPLES / "dpo.py"))["main"]
    margin = main(["--output", str(tmp_path), "--device-memory", "1GiB", "--steps", "2"])
    assert -5 < margin < 5 and "10,697,088 parameters of the reference model in chunks" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
def test_trainer_with_adapters(tmp_path, one_thread):
    main = runpy.run_path(str(EXAMPLES / "trainer.py"))["main"]
    assert main(["--output", str(tmp_path), "--device-memory", "1GiB", "--steps", "1", "--lora"]) < 6
    assert (tmp_path / "adapter_model.safetensors").is_file()
