"""Rates of a step's products in a report, beside those of the machine, and the advice that follows."""

from pathlib import Path

import pytest

from patrickstar._report.advice import advice
from patrickstar._report.products import about_products, slowest_rows
from patrickstar._report.run_file import Run
from patrickstar._schedule.step_timeline import Product, StepTimeline

SLOW_BF16 = {"fp32": 58e9, "bf16": 0.8e9}
FAST_BF16 = {"fp32": 100e9, "bf16": 400e9}
PRODUCTS = [
    Product("head.weight", False, 4 * 10**9, 1.0),
    Product("head.weight", True, 8 * 10**9, 8.0),
    Product("body.weight", False, 0, 0.0),
]


def run_in(precision: str, rates: dict[str, float] | None) -> Run:
    rated = {} if rates is None else {"core_rates": rates, "threads": 2}
    return Run(Path("log.jsonl"), {"precision": precision, "processes": 1, "device": "cpu"} | rated, [{"step": 1}])


def step(products: list[Product] = PRODUCTS) -> StepTimeline:
    return StepTimeline(step=1, end_s=10.0, products=products)


def test_a_slow_precision_is_named_with_what_would_help() -> None:
    """12 GFLOP in 9 s on 2 cores; in fp32 they would take 9 s * 0.8 / 58."""
    gain, rates, waits = advice(run_in("bf16", SLOW_BF16), step(), [])
    said = 'precision="fp32": 1.12 s per step instead of 10.00 s (estimate; its products are 72.5 times faster here).'
    assert gain == said
    assert "take 90% of the step, at 0.67 GFLOPS on each of 2 cores in bf16" in rates
    assert "58 GFLOPS in fp32 and 0.80 GFLOPS in bf16" in rates and "reaches 83% of its rate in bf16" in rates
    assert "The slowest is the backward of head.weight: 80% of the step, 0.50 GFLOPS." in rates
    assert "only faster or fewer operations" in waits


def test_fp32_where_bf16_is_faster() -> None:
    gain, _ = about_products(run_in("fp32", FAST_BF16), step())
    assert gain.startswith('precision="bf16": 3.25 s per step instead of 10.00 s')


@pytest.mark.parametrize(
    ("precision", "rates"),
    [("fp32", SLOW_BF16), ("bf16", FAST_BF16), ("bf16", {"fp32": 11e9, "bf16": 10e9})],
    ids=["fp32 is faster", "bf16 is faster", "fp32 gains less than its memory costs"],
)
def test_no_other_precision_is_advised_without_a_gain(precision: str, rates: dict[str, float]) -> None:
    assert len(about_products(run_in(precision, rates), step())) == 1


@pytest.mark.parametrize(
    ("rates", "products"), [(None, PRODUCTS), ({}, PRODUCTS), (SLOW_BF16, []), (SLOW_BF16, PRODUCTS[2:])]
)
def test_without_rates_or_products_nothing_is_said(rates: dict[str, float] | None, products: list[Product]) -> None:
    assert about_products(run_in("bf16", rates), step(products)) == []


def test_the_slowest_are_listed_first() -> None:
    first, second, third = slowest_rows(run_in("bf16", SLOW_BF16), step())
    assert first == ("8000.00", "80%", "the backward of head.weight", "0.50 GFLOPS")
    assert second == ("1000.00", "10%", "the forward of head.weight", "2.0 GFLOPS")
    assert third == ("0.00", "0%", "the forward of body.weight", "no rate")


def test_products_are_read_as_they_were_written() -> None:
    found = StepTimeline.of_json(step().as_json())
    assert found.products == PRODUCTS
    earlier = {name: value for name, value in step().as_json().items() if name != "products"}
    assert StepTimeline.of_json(earlier).products == []
