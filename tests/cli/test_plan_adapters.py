"""`patrickstar plan` with adapters, in other precisions, and of all open models that fit a machine."""

import json
import subprocess
import sys

import pytest
from command_line import assert_told, done, plan, planned

from patrickstar._models.open_models import OPEN_MODELS
from patrickstar._models.presets import PRESETS

LAPTOP = ["--gpu", "rtx4060", "--host-memory", "16GB"]
SHORT = ["--sequence", "64", "--batch", "4", "--no-activation-checkpointing"]
DRIVE = ["--disk", "2TB:7GB/s:5GB/s"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_adapters_have_frozen_bytes_and_states_of_their_own():
    options = ["--model", "gpt-1m", *LAPTOP, "--sequence", "64", "--batch", "4"]
    whole, lora, qlora = (planned(*options, *more) for more in ([], ["--lora", "4"], ["--qlora", "4"]))
    linears, hidden = 4 * 12 * 128 * 128, 128
    trained = 4 * 4 * 16 * hidden  # layers, rank, and the widths of four linear layers in units of the hidden one
    positions = (PRESETS["gpt-1m"].sequence - 64) * hidden  # a formula leaves out those of longer sequences
    base = whole["model"]["params"] + positions
    assert lora["model"]["params"] == qlora["model"]["params"] == base + trained
    assert lora["model_data_bytes"] == 2 * base + 16 * trained
    assert qlora["model_data_bytes"] == 2 * (base - linears) + linears // 2 + 16 * trained
    assert lora["lanes"][0]["amount"] < whole["lanes"][0]["amount"]


@pytest.mark.long("a plan and its dry run trace a model of transformers")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_plan_of_adapters_says_what_is_trained_and_what_to_write():
    options = ["--model", "gpt-1m", *LAPTOP, *SHORT]
    result = done("plan", *options, "--qlora", "4")
    assert result.stdout.startswith("gpt-1m with QLoRA of rank 4 fits rtx4060")
    for words in ("of which 0.0 million are trained", "Of the frozen parameters", "load_in_4bit=True", "r=4, "):
        assert words in result.stdout, result.stdout


def test_fp32_has_four_bytes_per_parameter_and_the_cards_own_rate():
    half, full = (
        planned("--model", "gpt-1m", *LAPTOP, *SHORT, "--precision", precision) for precision in ("bf16", "fp32")
    )
    positions = (PRESETS["gpt-1m"].sequence - 64) * 128
    assert half["model_data_bytes"] == 14 * half["model"]["params"]
    assert full["model"]["params"] == half["model"]["params"] + positions
    assert full["model_data_bytes"] == 16 * full["model"]["params"]
    assert full["machine"]["gpu"]["matmul_tflops"] == full["machine"]["gpu"]["fp32_tflops"]


def test_without_a_model_the_open_models_that_fit_are_told_in_80_columns():
    result = done("plan", *LAPTOP, *DRIVE)
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "estimates" in result.output and "LoRA, rank 16" in result.output and "1,200 TB" in result.output
    names = [line.split()[0] for line in lines if line.split() and line.split()[0] in OPEN_MODELS]
    assert names == sorted(names, key=lambda name: OPEN_MODELS[name].params) and len(names) > 20
    assert "rank 8" in done("plan", *LAPTOP, "--qlora", "8").output


def test_the_table_as_data_adds_up():
    found = json.loads(done("plan", "--gpu", "rtx4090", "--host-memory", "64GB", *DRIVE, "--json").output)
    models = {each["name"]: each for each in found["models"]}
    assert {*models, *found["too_large"]} == {*OPEN_MODELS}
    small, large = models["qwen2.5-0.5b"], models["llama-3-8b"]
    assert small["full"]["drive_tokens"] is None, "it fits in memory"
    assert large["full"]["tokens_per_s"] < large["lora"]["tokens_per_s"]
    hours = large["full"]["hours_per_million_tokens"]
    assert hours * 3600 * large["full"]["tokens_per_s"] == pytest.approx(10**6)
    assert 600 * 2e12 / large["full"]["drive_tokens"] > 12 * OPEN_MODELS["llama-3-8b"].params / 2**14
    # Models with experts: how peft adapts them is not planned.
    assert models["mixtral-8x7b"]["lora"] is None and models["mixtral-8x7b"]["full"] is not None
    without = json.loads(done("plan", *LAPTOP, "--json").output)
    fits = {each["name"] for each in without["models"]}
    assert fits < {*models} and next(m for m in without["models"] if m["name"] == "llama-3-8b")["full"] is None


def test_the_table_needs_no_torch():
    code = (
        "import sys; from patrickstar._cli.main import app; "
        "app(sys.argv[1:], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, "plan", *LAPTOP], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*LAPTOP, "--html", "plan.html"], "--html plan.html is for the plan of one model: add --model NAME"),
        (["--tp", "2"], "--tp 2 is for the plan of one model"),
        ([*LAPTOP, "--precision", "fp32"], "--precision fp32 is for the plan of one model"),
        ([*LAPTOP, "--lora", "0"], "--lora 0: the rank has to be at least 1"),
        ([*LAPTOP, "--lora", "4", "--qlora", "4"], "exclude each other"),
        ([*LAPTOP, "--largest", "--lora", "4"], "--lora 4 is for the plan of one model"),
        ([*LAPTOP, "--device-memory", "200MB"], "no open model fits rtx4060"),
        ([*LAPTOP, "--sequence", "1000000"], "no open model has positions for 1,000,000 tokens"),
        (["--model", "t5-58b", "--lora", "4"], "its plan is a formula of full fine-tuning in 16 bits"),
        (["--model", "gpt-1b", "--precision", "bf16"], "8xV100-32GB computes in fp16 or fp32"),
    ],
)
def test_what_can_not_be_planned_is_told_in_one_line(arguments, says):
    assert_told(plan(*arguments), says)
