"""Test the deferral of Ctrl-C."""

import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from patrickstar._hardware.defer_sigint import DeferSigint, SigintHandler, defer_sigint, handle_sigint


def strike():
    signal.raise_signal(signal.SIGINT)


@defer_sigint
def fail_after_a_strike():
    strike()
    raise ValueError("inside")


def test_nested_contexts_defer_to_the_outermost_and_a_second_ctrl_c_is_not_deferred():
    done = []
    with pytest.raises(KeyboardInterrupt), DeferSigint():
        with DeferSigint():
            strike()
        done.append("first")
        strike()
        done.append("second")
    assert done == ["first"]


@pytest.mark.parametrize("call", [fail_after_a_strike, handle_sigint(fail_after_a_strike)], ids=["section", "call"])
def test_error_inside_is_the_context_of_ctrl_c(call):
    with pytest.raises(KeyboardInterrupt) as caught:
        call()
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_user_handler_is_restored(handler):
    signal.signal(signal.SIGINT, handler)
    with DeferSigint():
        strike()
    assert signal.getsignal(signal.SIGINT) == handler


def in_a_thread(function):
    with ThreadPoolExecutor() as threads:
        return threads.submit(function).result()


def test_other_threads_do_not_change_handlers():
    @defer_sigint
    def handler():
        return signal.getsignal(signal.SIGINT)

    assert in_a_thread(handler) == signal.getsignal(signal.SIGINT)


@pytest.mark.parametrize("in_section", [True, False])
def test_sections_of_a_call_defer_to_their_end_and_the_rest_is_interrupted_at_once(in_section):
    done = []

    @handle_sigint
    def call():
        with DeferSigint():
            if in_section:
                strike()
            done.append("section")
        if not in_section:
            strike()
        done.append("call")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert done == ["section"] and SigintHandler.installed is None and not DeferSigint.active
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_the_user_sets_within_a_call_stays():
    handle_sigint(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))()
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


def test_sections_of_other_threads_do_not_defer():
    """A section in a worker thread during a call must not make the main thread's code one."""

    @defer_sigint
    def section():
        return DeferSigint.active

    assert handle_sigint(in_a_thread)(section) is False
