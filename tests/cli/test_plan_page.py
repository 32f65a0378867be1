"""`ps.plan`: a plan with a dry run of the engine, and its page, in a browser too where there is one."""

import json
import re
from pathlib import Path

import pytest
import torch
from browser import VIEWS, assert_accessible, assert_drawn, opened_page
from command_line import done
from torch import nn

import patrickstar as ps
from patrickstar._dry_run import simulation as dry_run
from patrickstar._perf_model.text_tables import format_seconds

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
            "the model has no method that enables it",
        ),
        ({"model": "gpt-1m", "sample": torch.zeros(2, 2)}, "`sample` and `loss` are for modules"),
        ({"model": "gpt-1m", "gpu": "rtx4090", "machine": "8xV100-32GB"}, "exclude each other"),
    ],
)
def test_what_can_not_be_planned(options: dict, message: str) -> None:
    with pytest.raises(ps.errors.ConfigError, match=re.escape(message)):
        ps.plan(**options)


def test_a_step_that_fits_the_estimate_alone_is_replaced_by_a_smaller_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    from patrickstar._plan.traced_model import TracedModel

    refused, dry_run = [], TracedModel.dry_run

    def refuse_large(self, machine, best):
        if best.workload.batch > 2:
            refused.append(best.workload.batch)
            raise ps.errors.BudgetError("it does not fit", 1)
        return dry_run(self, machine, best)

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
def test_browser(plan: ps.Plan, tmp_path: Path, color_scheme: str, width: int) -> None:
    plan.write_html(tmp_path / "plan.html")
    with opened_page(tmp_path / "plan.html", color_scheme, width) as page:
        assert page.locator(".picture:visible").count() == 3
        assert_drawn(page)
        assert_accessible(page)
