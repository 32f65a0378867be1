"""`patrickstar report`: the page of a run, in a browser too where there is one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import VIEWS, assert_accessible, assert_drawn, opened_page
from command_line import assert_refused, call, change_to, done, trained
from toys import layers, train

import patrickstar as ps
from patrickstar._report.memory_curves import memory_curves
from patrickstar._report.run_file import read_run
from patrickstar._report.stalls import named_stalls, stalled_s
from patrickstar._schedule.placement import Tier

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
        assert stalled_s(stalls) <= sum(stall.seconds for stall in stalls)
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
