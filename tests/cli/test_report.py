"""`patrickstar report` and `ps.plan`: pages of a run and of a plan, in a browser too where there is one."""

import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import VIEWS, assert_accessible, assert_drawn, opened_page
from command_line import assert_refused, call, change_to, done, trained
from torch import nn
from toys import inputs, layers, train

import patrickstar as ps
from patrickstar._dry_run import simulation as dry_run
from patrickstar._perf_model.text_tables import format_seconds
from patrickstar._plan.traced_model import TracedModel
from patrickstar._report.advice import advice
from patrickstar._report.memory_curves import memory_curves
from patrickstar._report.run_file import read_run
from patrickstar._report.stalls import covered_s, named_stalls
from patrickstar._schedule.placement import Tier
from patrickstar.testing import NoMeter

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 8


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the log of a run whose model data is larger than the budgets."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        change_to(folder, patch, n_layer=4, n_embd=64)
        options = ["--device-memory", "1550KiB", "--host-memory", "8MiB", "--chunk-size", "64KiB", "--lr", "3e-4"]
        trained("--sequence", 32, "--steps", STEPS, *options, "--quiet")
    return folder / "log.jsonl"


def test_what_is_read_is_what_the_run_did(log: Path) -> None:
    run = read_run(log)
    assert [step["step"] for step in run.steps] == list(range(1, STEPS + 1))
    assert [timeline.step for timeline in run.timelines] == [1, 2, 4, 8]
    assert run.steps[-1]["h2d_bytes"] > 0
    for timeline in run.timelines:
        last = run.steps[timeline.step - 1]
        device, host = (memory_curves(timeline, tier) for tier in (Tier.DEVICE, Tier.HOST))
        for curves in (device, host):
            assert curves.times == sorted(curves.times) and curves.times[-1] == timeline.end_s
        assert device.peak <= run.description["device_budget_bytes"]
        assert host.peak <= run.description["host_budget_bytes"]
        assert all(min(values) >= 0 for curves in (device, host) for values in curves.values.values())
        assert device.peak >= last["device_peak_model_bytes"]
        assert device.values["gradients"][0] == 0 and max(device.values["gradients"]) > 0
        stalls = named_stalls(timeline, run.names)
        assert covered_s(stalls) <= sum(stall.seconds for stall in stalls)
        assert all(stall.reason for stall in stalls)
    names = {name for each in run.names.values() for name in each}
    assert "transformer.h.0.attn.c_attn.weight" in names


def test_a_page_needs_no_network_and_has_units(log: Path, tmp_path: Path) -> None:
    result = done("report", log, "--output", tmp_path / "page.html")
    assert str(tmp_path / "page.html") in result.output.replace("\n", "")
    text = (tmp_path / "page.html").read_text()
    assert len(text) < 5 << 20
    outside = re.sub(r"<script>/\*\*.*?</script>", "", text, flags=re.DOTALL)  # the library has addresses of its own
    assert not re.search(r"""(src|href)=|url\(|https?://""", outside)
    figures = json.loads(re.search(r'<script id="figures" type="application/json">(.*?)</script>', text, re.DOTALL)[1])
    assert set(figures) >= {f"run0-step8-{name}" for name in ("channels", "device", "host", "residency")}
    for name, figure in figures.items():
        axes = [figure["layout"][axis] for axis in ("xaxis", "yaxis")]
        titles = [axis["title"]["text"] for axis in axes if "title" in axis]
        assert titles, name
        assert all(", " in title or title == "chunks" for title in titles), titles


def test_what_was_said_is_compared_with_what_it_took(tmp_path: Path) -> None:
    """A dry run inside of the recording; everything fits, so that the page has activations without moments."""
    torch.manual_seed(0)
    config = ps.Config(device="cpu", device_memory="64MiB", precision="fp32")
    batch = torch.zeros(2, 32)
    engine, _ = ps.initialize(layers(32, 4), config)
    with engine, engine.record(tmp_path / "log.jsonl"):
        said = engine.plan(batch, loss=torch.sum)
        train(engine, [(batch,)] * 8)
    run = read_run(tmp_path / "log.jsonl")
    assert (run.plan["seconds"], run.plan["h2d_bytes"]) == (said.seconds, said.stats.h2d_bytes)
    done("report", tmp_path / "log.jsonl")
    text = (tmp_path / "log.html").read_text()
    assert "What the dry run said, and what it took" in text and "<td>time of a step</td>" in text
    resident = memory_curves(run.timelines[-1], Tier.DEVICE)
    points = zip(resident.times, resident.values["activations and workspaces"], strict=True)
    assert any(nbytes > 0 for at_s, nbytes in points if at_s < resident.times[-1] / 2)


def test_two_runs_are_compared(log: Path, tmp_path: Path) -> None:
    done("report", log, "--compare", log, "--output", tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert text.count("<h1>GPT2LMHeadModel</h1>") == 2
    assert "log.jsonl: loss" in text


def test_the_log_of_a_killed_run_is_read(log: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.jsonl"
    text = log.read_text()
    cut.write_text(text[: text.index('"kind": "step", "step": 3') + 60])
    assert [step["step"] for step in read_run(cut).steps] == [1, 2]
    done("report", cut)
    assert cut.with_suffix(".html").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"can't be read: No such file"),
        ("", "lacks the description of a run; write one with"),
        ("[1]\n{}\n", "line 1 of .* is no record of a run"),
        ('{"kind": "run", "format": 9}\n{}\n', "its format is 9, and this version reads 1"),
        ('{"kind": "nothing"}\n{}\n', "there is no kind of record 'nothing'"),
    ],
)
def test_what_is_no_log_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    if text is not None:
        path.write_text(text)
    refused = call("report", path)
    assert refused.exit_code == 2
    assert re.search(message, refused.stderr), refused.stderr
    assert not path.with_suffix(".html").exists()


def test_a_page_that_can_not_be_written_is_named(log: Path, tmp_path: Path) -> None:
    refused = call("report", log, "--output", tmp_path / "missing" / "page.html")
    assert_refused(refused, "page.html can't be written: No such file or directory; choose another file")


@pytest.fixture
def page(log: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Any]:
    """Open the page of the run in Chromium, with the theme and the width of the parameter."""
    done("report", log, "--output", tmp_path / "page.html")
    with opened_page(tmp_path / "page.html", *request.param) as opened:
        yield opened


@pytest.mark.parametrize("page", VIEWS, indirect=True, ids=["light and wide", "dark and narrow"])
def test_browser(page: Any) -> None:
    """Every picture is drawn, a chunk's parameters show on hover, keys work, and axe finds no violation."""
    assert page.locator(".picture:visible").count() >= 8
    assert_drawn(page)
    heat = page.locator(".picture[data-figure$=residency]:visible .nsewdrag")
    heat.scroll_into_view_if_needed()
    box = heat.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 3)
    page.wait_for_selector(".hoverlayer .hovertext")
    assert "transformer." in page.locator(".hoverlayer .hovertext").first.text_content()
    page.keyboard.press("Escape")
    page.locator("#step0").focus()
    page.keyboard.press("ArrowUp")
    assert page.locator("#run0-step4").is_visible() and not page.locator("#run0-step8").is_visible()
    page.wait_for_selector("#run0-step4 .picture .main-svg")
    assert_accessible(page)


# Advice


def test_every_recorded_step_has_advice(tmp_path: Path) -> None:
    """1 MiB of parameters, 6 MiB of masters and states, 16 KiB of activations per layer."""
    torch.manual_seed(0)
    config = ps.Config(device="cpu", chunk_size="128KiB", device_memory=1536 << 10, host_memory="64MiB")
    model = partial(layers, 256, 8, nn.GELU)
    with ps.Engine(model, config, meter=NoMeter()) as engine, engine.record(tmp_path / "log"):
        train(engine, inputs(4, 256, rows=32))
    run = read_run(tmp_path / "log")
    for timeline in run.timelines:
        sentences = advice(run, timeline, named_stalls(timeline, run.names))
        assert sentences and all(text.endswith(".") for text in sentences)


# Plans

PARTS = {"gpu": "rtx4090", "host_memory": "16GB", "disk": "1TB:7GB/s"}


@pytest.fixture(scope="module")
def plan() -> ps.Plan:
    return ps.plan("gpt-10m", **PARTS, batch=4, sequence=128, activation_checkpointing=False)


def test_a_plan_is_the_engines_dry_run_with_the_bound_beside_it(plan: ps.Plan) -> None:
    assert plan.dry_run is not None
    assert plan.step_s == plan.dry_run.seconds
    assert plan.tokens_per_s == pytest.approx(4 * 128 / plan.step_s)
    text = str(plan)
    assert text.startswith("gpt-10m fits rtx4090 with 16 GB of host memory and trains at ")
    assert f"takes in a dry run of the engine {format_seconds(plan.step_s)}" in text
    assert f"no step takes less than {format_seconds(plan.bound_s)}, because of {plan.limited_by}" in text
    assert plan.bound_s <= plan.step_s
    assert "-0%" not in text and "+0" not in text
    assert re.search(rf"\n  compute +{format_seconds(plan.dry_run.compute_s)} ", text)
    assert "`patrickstar train --dry-run --machine` shows such a step in full" in text


def test_plan_and_dry_run_of_training_say_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reports = []

    def simulate(*arguments, **options):
        reports.append(dry_run.simulate(*arguments, **options))
        return reports[-1]

    options = ["--model", "gpt-1m", "--machine", "RTX4090-desktop", "--batch", "2", "--sequence", "64"]
    planned = done("plan", *options, "--no-activation-checkpointing", "--json")
    monkeypatch.setattr("patrickstar._cli.dry_run.simulate", simulate)
    simulated = done("train", *options, "--disk", tmp_path, "--dry-run")
    assert "`patrickstar plan` finds the fastest batch, and the least time of any placement" in simulated.output
    assert reports[0].seconds == json.loads(planned.stdout)["step_s"]


def test_a_module_of_ones_own_is_planned_by_a_sample() -> None:
    model = nn.Sequential(nn.Embedding(1000, 64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    ids = torch.zeros(8, 16, dtype=torch.int64)
    plan = ps.plan(model, sample=ids, batch=8, gpu="rtx3090", device_memory="256MB")
    assert plan.best.workload.params == sum(param.numel() for param in model.parameters())
    assert (plan.batch, plan.model.sequence, plan.activation_checkpointing) == (8, 16, False)
    assert plan.tokens_per_s == pytest.approx(8 * 16 / plan.step_s)
    assert all(not param.is_meta for param in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": nn.Linear(2, 2)}, "the plan of a module needs inputs as in training"),
        ({"model": nn.Linear(2, 2), "sample": torch.tensor(0.0)}, "no common first dimension"),
        (
            {"model": nn.Linear(2, 2), "sample": torch.zeros(2, 2), "activation_checkpointing": True},
            "Linear has no layers of transformers that can be recomputed",
        ),
        ({"model": "gpt-1m", "sample": torch.zeros(2, 2)}, "`sample` and `loss` are for modules"),
        ({"model": "gpt-1m", "gpu": "rtx4090", "machine": "8xV100-32GB"}, "exclude each other"),
    ],
)
def test_what_can_not_be_planned(options: dict, message: str) -> None:
    with pytest.raises(ps.errors.ConfigError, match=re.escape(message)):
        ps.plan(**options)


def test_a_module_without_layers_to_recompute_is_refused_in_bytes() -> None:
    """No batch of it fits with recomputed layers, since it has none."""
    options = {"gpu": "rtx4060", "host_memory": "16GB", "device_memory": "1MB"}
    with pytest.raises(ps.errors.BudgetError, match="more device memory"):
        ps.plan(partial(nn.Linear, 1024, 1024), sample=torch.zeros(4, 1024), **options)


def test_a_step_that_fits_the_estimate_alone_is_replaced_by_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    refused, run_dry = [], TracedModel.dry_run

    def refuse_large(self, machine, best):
        if best.workload.batch > 2:
            refused.append(best.workload.batch)
            raise ps.errors.BudgetError("it does not fit", 1)
        return run_dry(self, machine, best)

    monkeypatch.setattr(TracedModel, "dry_run", refuse_large)
    plan = ps.plan("gpt-1m", gpu="rtx4090", sequence=64, activation_checkpointing=False)
    assert refused and plan.batch <= 2 and plan.dry_run is not None
    with pytest.raises(ps.errors.BudgetError, match="it does not fit"):
        ps.plan("gpt-1m", gpu="rtx4090", sequence=64, batch=4)


def test_the_frontier_rises_with_memory_and_contains_the_plan(plan: ps.Plan) -> None:
    assert [each.tier for each in plan.frontier] == ["device memory", "host memory"]
    for frontier in plan.frontier:
        sizes, speeds = zip(*frontier.points, strict=True)
        assert list(sizes) == sorted(sizes) and list(speeds) == sorted(speeds)
        present = plan.machine.gpu if frontier.tier == "device memory" else plan.machine.host
        assert dict(frontier.points)[present.memory] == pytest.approx(plan.best.tokens_per_s, rel=0.05)


def test_a_notebook_shows_the_page(plan: ps.Plan, tmp_path: Path) -> None:
    plan.write_html(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert len(text) < 5 << 20
    for words in ("Speed over host memory", "a second drive", "ps.Config", plan.machine.source):
        assert words in text
    assert plan._repr_html_().startswith('<iframe srcdoc="&lt;!DOCTYPE html&gt;')
    with pytest.raises(ps.errors.ConfigError, match="can't be written: Is a directory"):
        plan.write_html(tmp_path)


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    result = done("plan", "--model", "gpt-1m", "--gpu", "rtx4090", "--no-dry-run", "--html", str(page))
    assert f"{page} shows this plan in a browser" in result.output.replace("\n", "")
    assert "<title>gpt-1m, 4 layers x 128: plan</title>" in page.read_text()


@pytest.mark.parametrize(("color_scheme", "width"), VIEWS, ids=["light and wide", "dark and narrow"])
def test_browser_with_a_plan(plan: ps.Plan, tmp_path: Path, color_scheme: str, width: int) -> None:
    plan.write_html(tmp_path / "plan.html")
    with opened_page(tmp_path / "plan.html", color_scheme, width) as page:
        assert page.locator(".picture:visible").count() == 3
        assert_drawn(page)
        assert_accessible(page)
