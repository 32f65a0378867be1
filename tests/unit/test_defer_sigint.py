"""Test the deferral of Ctrl-C."""

import signal
import threading

import pytest

from patrickstar._memory.defer_sigint import DeferSigint, defer_sigint


def strike():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_is_raised_after_the_work():
    done = []

    @defer_sigint
    def work():
        strike()
        done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


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
