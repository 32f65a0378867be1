"""Test the deferral of Ctrl-C."""

import signal
import threading

import pytest

from patrickstar._memory.defer_sigint import DeferSigint, SigintHandler, defer_sigint, handle_sigint


def strike():
    signal.raise_signal(signal.SIGINT)


def test_nested_contexts_defer_to_the_outermost():
    done = []
    with pytest.raises(KeyboardInterrupt), DeferSigint():
        with DeferSigint():
            strike()
        done.append("whole")
    assert done == ["whole"]


def test_second_ctrl_c_is_not_deferred():
    done = []
    with pytest.raises(KeyboardInterrupt), DeferSigint():
        strike()
        done.append("first")
        strike()
        done.append("second")
    assert done == ["first"]


def test_error_inside_is_the_context_of_ctrl_c():
    with pytest.raises(KeyboardInterrupt) as caught, DeferSigint():
        strike()
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_user_handler_is_restored(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DeferSigint():
            strike()
        assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_not_change_handlers():
    seen = []

    def look():
        with DeferSigint():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]


def test_sections_of_a_call_defer_to_their_end():
    done = []

    @defer_sigint
    def section():
        strike()
        done.append("section")

    @handle_sigint
    def call():
        section()
        done.append("call")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert done == ["section"] and SigintHandler.installed is None
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_call_is_interrupted_at_once_outside_of_sections():
    done = []

    @handle_sigint
    def call():
        with DeferSigint():
            pass
        strike()
        done.append("call")

    with pytest.raises(KeyboardInterrupt):
        call()
    assert not done and not DeferSigint.active


def test_an_error_in_a_section_of_a_call_is_the_context_of_ctrl_c():
    @defer_sigint
    def section():
        strike()
        raise ValueError("inside")

    with pytest.raises(KeyboardInterrupt) as caught:
        handle_sigint(section)()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_that_the_user_sets_within_a_call_stays():
    before = signal.getsignal(signal.SIGINT)
    try:
        handle_sigint(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN))()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_sections_of_other_threads_do_not_defer():
    """A section in a worker thread during a call must not make the main thread's code one."""
    seen = []

    @defer_sigint
    def section():
        seen.append(DeferSigint.active)

    @handle_sigint
    def call():
        thread = threading.Thread(target=section)
        thread.start()
        thread.join()

    call()
    assert seen == [False]
