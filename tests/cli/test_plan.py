"""`patrickstar plan`, of one model and of all that fit, and `patrickstar train --dry-run`, as a user types them."""

import json
import re
from functools import partial

import pytest
from command_line import assert_refused, assert_told, call, done, plan, planned
from transformers import MixtralForCausalLM

import patrickstar as ps
from patrickstar._models.open_models import OPEN_MODELS
from patrickstar._models.presets import EXPERT_PRESETS, PRESETS
from patrickstar._perf_model.machine_spec import find_machine
from patrickstar._perf_model.mesh import Mesh
from patrickstar._perf_model.text_tables import SPARKLINE_WIDTH, sparkline
from patrickstar._plan.planned_model import find_planned_model
from patrickstar._plan.search import Search
from patrickstar._plan.upgrades import SPLITTING
from patrickstar.errors import ConfigError

RTX4060 = ["--gpu", "rtx4060", "--host-memory", "16GB"]
DRIVE = ["--disk", "2TB:7GB/s:5GB/s"]
SHORT = ["--sequence", "64", "--batch", "4", "--no-activation-checkpointing", "--device-memory", "60MB"]
"""With little memory the search for the largest batch ends soon."""


@pytest.fixture
def plan_and_values(monkeypatch):
    """Return a function that runs a plan once, and returns the command's result and the plan as plain data."""
    found, search = [], Search.plan
    monkeypatch.setattr(Search, "plan", lambda self, model: found.append(search(self, model)) or found[-1])
    return lambda *arguments: (plan(*arguments), found[-1].as_dict())


def test_a_plan_says_what_fits_how_fast_and_why():
    result = plan("--model", "gpt-12b", "--machine", "8xV100-32GB", "--gpus", "1")
    says = "12.29 billion", "at most 26 fit", "idle", "busiest resource alone", "TFLOPS", "where the time goes"
    for words in (*says, "memory", "hidden behind computation"):
        assert words in result.output
    assert "12 encoder and 12 decoder layers x 768" in plan("--model", "t5-220m", "--machine", "RTX4090-desktop").output


def test_as_json_it_is_plain_data_that_adds_up():
    found = planned("--model", "gpt-4b", "--machine", "8xV100-32GB", "--gpus", "1")
    assert found["step_s"] >= found["bound_s"] <= 1.001 * max(lane["seconds"] for lane in found["lanes"])
    assert found["device_bytes"] <= found["budgets"]["device"] < found["machine"]["gpu"]["memory"]
    assert found["host_bytes"] <= found["budgets"]["host"] < found["machine"]["host"]["memory"]


@pytest.mark.parametrize(
    ("model", "billions"), [("gpt-28b", 21.4), ("gpt-55b", 55.2), ("t5-27b", 13.3), ("t5-58b", 28.3)]
)
def test_angel_ptms_models_fit_its_server(model, billions):
    found = planned("--model", model, "--machine", "8xA100-40GB-11TB", "--sequence", "512")
    assert found["processes"] == 8 and found["model"]["sequence"] == 512
    assert found["model"]["params"] / 1e9 == pytest.approx(billions, rel=0.01)


def test_the_largest_model_is_larger_on_more_gpus_and_smaller_at_a_higher_bar():
    def params(*more: str) -> int:
        return planned("--largest", "--machine", "8xV100-32GB", *more)["model"]["params"]

    one = params("--gpus", "1")
    assert params("--gpus", "8") > one > params("--gpus", "1", "--host-memory", "60GB")
    assert one >= params("--gpus", "1", "--least-tflops", "30")


LAPTOP = """
name = "laptop"
source = "a guess"
[host]
memory = "64GB"
memory_bandwidth = "40GB"
cores = 8
matmul_tflops = 1.0
"""


@pytest.mark.parametrize("machine", [pytest.param("RTX4090-desktop", marks=pytest.mark.slow), "laptop.toml"])
def test_any_configuration_is_traced_and_comes_to_what_counting_says(tmp_path, monkeypatch, machine):
    """GPT-2's work by its operators, and a GPT's by formulas: the same model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "laptop.toml").write_text(LAPTOP)
    path = tmp_path / "config.json"
    path.write_text(PRESETS["gpt-1m"].config().to_json_string())
    arguments = ["--machine", machine, "--host-memory", "4GB", "--sequence", "256", "--batch", "4"]
    arguments.append("--activation-checkpointing")
    traced, counted = (planned("--model", model, *arguments) for model in (str(path), "gpt-1m"))
    positions = (1024 - 256) * 128  # which a formula of shorter sequences leaves out
    assert traced["model"]["params"] == counted["model"]["params"] + positions
    operations = [found["lanes"][0]["amount"] for found in (traced, counted)]
    # Counting has a layer's last product computed again, too, which checkpointing leaves out.
    assert 0.93 * operations[1] < operations[0] < operations[1]
    assert traced["non_model_bytes"] == pytest.approx(counted["non_model_bytes"], rel=0.35)


def test_a_tiled_loss_leaves_out_logits_and_is_in_the_configuration_to_paste():
    options = [
        "--model",
        "gpt2-124m",
        "--machine",
        "RTX4090-desktop",
        "--sequence",
        "512",
        "--batch",
        "16",
        "--no-dry-run",
    ]
    plain, tiled = planned(*options), planned(*options, "--tiled-loss")
    logits = 16 * 512 * PRESETS["gpt2-124m"].vocab
    assert plain["non_model_bytes"] - tiled["non_model_bytes"] > 6 * logits
    assert "tiled_loss=True, tiled_mlp=True" in plan(*options, "--tiled-loss", "--tiled-mlp").output
    assert_told(plan("--model", "t5-220m", "--tiled-loss"), "t5-220m with --tiled-loss: its plan is a formula")
    assert_told(plan("--tiled-loss"), "--tiled-loss True is for the plan of one model")


def test_a_machine_is_described_by_its_parts():
    parts = ["--model", "gpt-8b", "--gpu", "rtx4090", "--host-memory", "64GB", "--disk", "2TB:7GB/s:5GB/s"]
    desktop = ["--model", "gpt-8b", "--machine", "RTX4090-desktop"]
    by_parts, whole = planned(*parts), planned(*desktop)
    for each in (by_parts, whole):
        del each["machine"]
    assert by_parts == whole
    assert planned(*desktop, "--disk", "2TB:1GB/s")["step_s"] > whole["step_s"]
    assert_told(plan("--gpu", "rtx4090", "--machine", "RTX4090-desktop"), "exclude each other")


def test_the_host_of_a_container_has_fewer_cores_and_less_bandwidth_than_the_machine():
    server = partial(planned, "--model", "gpt-4b", "--gpu", "h200", "--device-memory", "24GiB")
    whole, part, slow = server(), server("--cores", "4"), server("--host-bandwidth", "50GB/s", "--cores", "16")
    assert whole["estimated_step_s"] < part["estimated_step_s"] and whole["step_s"] < part["step_s"]
    assert part["limited_by"] == slow["limited_by"] == "host memory"
    assert slow["machine"]["host"] | {"memory": 0} == {
        **(whole["machine"]["host"] | {"memory": 0}),
        **{"cores": 16, "memory_bandwidth": 50e9, "sockets": 1},
    }


@pytest.mark.parametrize("option", ["batch", "sequence", "gpus", "nodes", "cores", "tp"])
def test_a_plan_of_nothing_is_refused_in_python_too(option):
    with pytest.raises(ConfigError, match=f"{option}=0: at least one is needed"):
        ps.plan("gpt-1b", gpu="h200", **{option: 0})


def test_a_plan_answers_first_and_says_what_to_set_and_to_buy(plan_and_values):
    options = ["--model", "gpt-8b", "--gpu", "rtx4090", "--host-memory", "64GB", "--disk", "1TB:2GB/s"]
    done, found = plan_and_values(*options)
    assert done.output.startswith(
        f"gpt-8b fits rtx4090 with 64 GB of host memory and trains at {found['tokens_per_s']:,.0f} tokens/s: a "
    )
    assert 'config = ps.Config(precision="bf16", disk="FOLDER ON THE DRIVE"' in done.output
    upgrades = found["upgrades"]
    assert list(upgrades) == ["32 GB more host memory", "a second drive", "packed pages", "a second GPU", SPLITTING]
    assert all(gained > 0 for gained in upgrades.values())
    assert upgrades["packed pages"] < 0.137  # The drive transfers 0.880 of the bytes.
    written = next(lane["amount"] for lane in found["lanes"] if lane["name"] == "disk write")
    assert found["drive_days"] == pytest.approx(600e12 / (written / found["step_s"] * 86400))
    assert "(usual for its capacity)" in done.output
    cluster = planned("--model", "gpt-28b", "--machine", "8xA100-40GB-11TB", "--nodes", "2")
    assert cluster["upgrades"] == {}


def test_a_preset_with_experts_is_traced_as_a_configuration():
    model = find_planned_model("mixtral-4m", 64, find_machine("RTX4090-desktop"), None)
    config = EXPERT_PRESETS["mixtral-4m"].config()
    assert model.sequence == 64
    expected = sum(parameter.numel() for parameter in MixtralForCausalLM(config).parameters())
    assert model.workload(1, True, Mesh()).params == expected


def test_a_configuration_that_can_not_be_used_is_told_in_one_line(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "resnet"}')
    assert_refused(plan("--model", str(path)), "no language model")
    path.write_text(PRESETS["gpt-1m"].config().to_json_string())
    assert_refused(plan("--model", str(path), "--sequence", "4096"), "positions for 1024 tokens")


def test_a_sparkline_of_memory_shows_the_most_in_each_part_of_the_time():
    drawn = sparkline([(0.0, 0), (0.5, 100), (0.51, 1), (1.0, 50)], 1.0, 100)
    assert len(drawn) == SPARKLINE_WIDTH
    assert drawn[0] == " " and drawn[SPARKLINE_WIDTH // 2] == "█" and drawn[-1] == "▄"
    assert sparkline([], 1.0, 100) == sparkline([(0.0, 1)], 0.0, 100) == ""


def test_a_plan_says_what_late_updates_would_gain(plan_and_values):
    options = ["--model", "gpt-8b", "--machine", "RTX4090-desktop", "--batch", "4"]
    result, found = plan_and_values(*options)
    assert result.exit_code == 0 and "\ndelayed         updates would gain nothing here" in result.output
    assert "\nlock-free       updates would shorten the estimated step from" in result.output
    assert found["lock_free"]["step_s"] < found["step_s"] and found["lock_free"]["staleness"] > 1
    result, found = plan_and_values("--model", "gpt-1b")
    assert result.exit_code == 0 and "lock-free" not in result.output and found["lock_free"] is None


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--model", "gpt-13b"], "gpt-12b, gpt-10b?"),
        (["--model", "t5-28b"], "did you mean t5-58b, t5-27b"),
        (["--gpus", "9"], "8xV100-32GB has 8"),
        (["--host-memory", "lots"], "'lots' is not a size"),
        (["--host-bandwidth", "170GB/h"], "--host-bandwidth 170GB/h: write a rate such as 170GB/s"),
        (["--model", "gpt-12b", "--host-memory", "1GB", "--gpus", "1"], "more host memory"),
        (["--model", "gpt-12b", "--batch", "4096"], "a smaller batch"),
        (
            ["--model", "gpt-12b", "--batch", "4096", "--gpus", "1"],
            "--batch 26 --activation-checkpointing fits; 256 passes of 16 accumulate as many sequences per step",
        ),
        (
            ["--model", "gpt-12b", "--batch", "16", "--gpus", "1", "--no-activation-checkpointing"],
            "--batch 3 or --batch 16 --activation-checkpointing fits",
        ),
        (["--gpu", "rtx4060", "--device-memory", "100GB"], "--device-memory 100GB: a GPU of rtx4060 with 64 GB of"),
        (["--machine", "700-dollar-pc", "--model", "gpt-12b"], "more disk"),
        ([*RTX4060, "--html", "plan.html"], "--html plan.html is for the plan of one model: add --model NAME"),
        (["--tp", "2"], "--tp 2 is for the plan of one model"),
        ([*RTX4060, "--precision", "fp32"], "--precision fp32 is for the plan of one model"),
        ([*RTX4060, "--lora", "0"], "--lora 0: the rank has to be at least 1"),
        ([*RTX4060, "--lora", "4", "--qlora", "4"], "exclude each other"),
        ([*RTX4060, "--largest", "--lora", "4"], "--lora 4 is for the plan of one model"),
        ([*RTX4060, "--device-memory", "200MB"], "no open model fits rtx4060"),
        ([*RTX4060, "--sequence", "1000000"], "no open model has positions for 1,000,000 tokens"),
        (["--model", "t5-58b", "--lora", "4"], "its plan is a formula of full fine-tuning in 16 bits"),
        (["--model", "gpt-1b", "--precision", "bf16"], "8xV100-32GB computes in fp16 or fp32"),
    ],
)
def test_what_is_wrong_is_told_in_one_line(arguments, says):
    assert_told(plan(*arguments), says)


def test_a_machine_file_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(LAPTOP)
    result = plan("--model", "gpt-1b", "--machine", str(path))
    assert result.exit_code == 0 and "laptop, one device" in result.output
    path.write_text(path.read_text().replace('"40GB"', '"-40GB"'))
    assert_refused(plan("--machine", str(path)), "host.memory_bandwidth")


def test_a_dry_run_of_several_processes():
    options = ["train", "--dry-run", "--model", "gpt-1m", "--sequence", "32", "--machine", "8xV100-32GB"]
    result = done(*options, "--processes", "4", "--replicas", "2", "--accumulation", "2")
    assert "\nprocesses       4 in 2 replicas; the figures are those of the first\n" in result.output
    sent = r"\nsent +\S+ \S+ of parameters \(\S+ \S+ to other replicas\), \S+ \S+ of gradients"
    assert re.search(sent, result.output)
    assert "\n  collectives " in result.output and "\ndelayed " not in result.output
    on_cpu = ["--device", "cpu", "--precision", "fp32", "--device-memory", "32MiB", "--host-memory", "1GiB"]
    result = done(*options[:-2], *on_cpu, "--processes", "2")
    assert "32.00 MiB" in result.output and "512.00 MiB" in result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--processes", "4"], "--processes 4 requires --dry-run"),
        (["--dry-run", "--processes", "4", "--replicas", "3"], "4 processes can't be divided into --replicas 3"),
        (["--dry-run", "--processes", "4", "--tp", "2"], "can't simulate collectives inside of operators"),
        (["--dry-run", "--processes", "12", "--machine", "8xV100-32GB"], "12 processes do not fill machines of 8 GPUs"),
    ],
)
def test_processes_that_can_not_be_simulated(arguments, says):
    assert_told(call("train", "--model", "gpt-1m", *arguments), says)


def test_a_dry_run_says_what_a_step_takes_and_trains_nothing(tmp_path, small_text):
    log = tmp_path / "log.jsonl"
    options = ["--model", "model.json", "--sequence", "32", "--batch", "1", "--device", "cpu", "--precision", "fp32"]
    options += ["--device-memory", "32MiB"]
    result = done("train", *options, "--dry-run", "--log", str(log))
    for words in ("nothing was trained", "step", "where the time goes", "idle", "32.00 MiB", "moved", "over the step"):
        assert words in result.output
    _, _, after = result.output.partition("the step over time")
    lines, exposed, _ = after.partition("exposed: compute waits")
    assert lines and exposed
    drawn = {line[2:22].rstrip(): line[22:] for line in lines.splitlines()[1:]}
    assert len(drawn["compute"]) == SPARKLINE_WIDTH and "█" in drawn["compute"]
    assert drawn["update on the host"].strip() and drawn["compute waits"].strip()
    assert not log.exists()
    assert "\ndelayed         updates would" in result.output
    assert "updates would" not in done("train", *options, "--dry-run", "--delay-from", "9").output
    assert_refused(call("train", *options[:-1], "1KiB", "--dry-run"), "does not fit")


# Adapters, precisions, and the table of open models


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_adapters_have_frozen_bytes_and_states_of_their_own():
    options = ["--model", "gpt-1m", *RTX4060, "--sequence", "64", "--batch", "4"]
    whole, lora, qlora = (planned(*options, *more) for more in ([], ["--lora", "4"], ["--qlora", "4"]))
    linears, hidden = 4 * 12 * 128 * 128, 128
    trained = 4 * 4 * 16 * hidden  # layers, rank, and the widths of four linear layers in units of the hidden one
    positions = (PRESETS["gpt-1m"].sequence - 64) * hidden  # a formula leaves out those of longer sequences
    base = whole["model"]["params"] + positions
    assert lora["model"]["params"] == qlora["model"]["params"] == base + trained
    assert lora["model_data_bytes"] == 2 * base + 16 * trained
    assert qlora["model_data_bytes"] == 2 * (base - linears) + linears // 2 + 16 * trained
    assert lora["lanes"][0]["amount"] < whole["lanes"][0]["amount"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_plan_of_adapters_says_what_is_trained_and_what_to_write():
    options = ["--model", "gpt-1m", *RTX4060, *SHORT]
    result = done("plan", *options, "--qlora", "4")
    assert result.stdout.startswith("gpt-1m with QLoRA of rank 4 fits rtx4060")
    for words in ("of which 0.0 million are trained", "Of the frozen parameters", "load_in_4bit=True", "r=4, "):
        assert words in result.stdout, result.stdout


def test_fp32_has_four_bytes_per_parameter_and_the_cards_own_rate():
    options = ["--model", "gpt-1m", *RTX4060, *SHORT, "--precision"]
    half, full = planned(*options, "bf16"), planned(*options, "fp32")
    positions = (PRESETS["gpt-1m"].sequence - 64) * 128
    assert half["model_data_bytes"] == 14 * half["model"]["params"]
    assert full["model"]["params"] == half["model"]["params"] + positions
    assert full["model_data_bytes"] == 16 * full["model"]["params"]
    assert full["machine"]["gpu"]["matmul_tflops"] == full["machine"]["gpu"]["fp32_tflops"]


def test_without_a_model_the_open_models_that_fit_are_told_in_80_columns():
    result = done("plan", *RTX4060, *DRIVE)
    lines = result.output.splitlines()
    assert max(map(len, lines)) <= 80
    assert "estimates" in result.output and "LoRA, rank 16" in result.output and "1,200 TB" in result.output
    names = [line.split()[0] for line in lines if line.split() and line.split()[0] in OPEN_MODELS]
    assert names == sorted(names, key=lambda name: OPEN_MODELS[name].params) and len(names) > 20


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
    without = json.loads(done("plan", *RTX4060, "--json").output)
    fits = {each["name"] for each in without["models"]}
    assert fits < {*models} and next(m for m in without["models"] if m["name"] == "llama-3-8b")["full"] is None
