"""Test the gate where Ctrl-C waits."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from patrickstar._hardware.sigint_gate import (
    ABSENT,
    GATE,
    deferring_sigint,
    interruptible,
    interruption_point,
    managing,
    uninterruptible,
)

SECTIONS = [deferring_sigint, uninterruptible, managing]


def strike():
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _gate_is_removed():
    yield
    assert GATE.position == ABSENT and not GATE.thread and GATE.deferred is None
    assert signal.getsignal(signal.SIGINT) != GATE._handle


@pytest.mark.parametrize("section", SECTIONS)
def test_nested_sections_defer_to_the_outermost_and_a_second_ctrl_c_is_not_deferred(section):
    done = []
    with pytest.raises(KeyboardInterrupt), section():
        with section():
            strike()
        done.append("first")
        strike()
        done.append("second")
    assert done == ["first"]


@pytest.mark.parametrize("section", SECTIONS)
def test_error_inside_is_the_context_of_ctrl_c(section):
    with pytest.raises(KeyboardInterrupt) as caught, section():
        strike()
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_user_handler_is_restored(handler):
    signal.signal(signal.SIGINT, handler)
    with deferring_sigint():
        strike()
    assert signal.getsignal(signal.SIGINT) == handler


def test_a_handler_that_the_user_sets_within_a_section_stays():
    with deferring_sigint():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("when", ["before", "inside", "in a section inside"])
def test_user_code_inside_a_section_is_interrupted_at_once(section, when):
    done = []
    with pytest.raises(KeyboardInterrupt), deferring_sigint():
        try:
            if when == "before":
                strike()
            done.append("engine")
            with interruptible():
                done.append("user")
                if when == "inside":
                    strike()
                with section():
                    if when == "in a section inside":
                        strike()
                    done.append("section")
                done.append("more")
        finally:
            done.append("handled")
    expected = {"before": ["engine"], "inside": ["engine", "user"]}
    assert done == [*expected.get(when, ["engine", "user", "section"]), "handled"]


def test_an_interruption_point_lets_ctrl_c_take_effect_early():
    done = []
    with pytest.raises(KeyboardInterrupt), deferring_sigint():
        for number in range(3):
            interruption_point()
            done.append(number)
            if number == 1:
                strike()
            with managing():
                pass
    assert done == [0, 1]


def test_an_uninterruptible_section_has_no_interruption_points():
    done = []
    with pytest.raises(KeyboardInterrupt), deferring_sigint():
        with uninterruptible():
            strike()
            with managing(), interruptible():
                interruption_point()
            done.append("whole")
        interruption_point()
        done.append("more")
    assert done == ["whole"]


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_ctrl_c_leaves_the_modes_as_they_were(enabled, inference):
    with torch.inference_mode(inference), torch.set_grad_enabled(enabled):
        before = torch.is_grad_enabled()
        with pytest.raises(KeyboardInterrupt), managing():
            assert not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
            strike()
        assert (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) == (before, inference)


def in_a_thread(function):
    with ThreadPoolExecutor() as threads:
        return threads.submit(function).result()


@pytest.mark.parametrize("section", [*SECTIONS, interruptible])
def test_other_threads_change_neither_handlers_nor_the_gate(section):
    def inside():
        with section():
            return signal.getsignal(signal.SIGINT), GATE.position

    assert in_a_thread(inside) == (signal.default_int_handler, ABSENT)
    with deferring_sigint():
        assert in_a_thread(inside) == (GATE._handle, GATE.position)


def test_ctrl_c_may_strike_while_the_handler_is_removed(monkeypatch):
    """The next section removes it then."""

    def struck(number, handler):
        monkeypatch.undo()
        strike()

    with pytest.raises(KeyboardInterrupt), deferring_sigint():
        monkeypatch.setattr("patrickstar._hardware.sigint_gate._signal.signal", struck)
    assert signal.getsignal(signal.SIGINT) == GATE._handle
    with pytest.raises(KeyboardInterrupt), deferring_sigint():
        strike()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
