"""What Ctrl-C does not tear in two."""

import signal
import threading

import pytest

from patrickstar._memory.defer_sigint import DeferSigint, defer_sigint


def strike():
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_comes_when_the_work_is_done():
    done = []

    @defer_sigint
    def work():
        strike()
        done.append("whole")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["whole"]


def test_inside_another_it_waits_for_the_outermost():
    done = []
    with pytest.raises(KeyboardInterrupt), DeferSigint():
        with DeferSigint():
            strike()
        done.append("whole")
    assert done == ["whole"]


def test_who_asks_twice_does_not_wait():
    done = []
    with pytest.raises(KeyboardInterrupt), DeferSigint():
        strike()
        done.append("first")
        strike()
        done.append("second")
    assert done == ["first"]


def test_an_error_inside_is_not_lost_when_ctrl_c_comes_too():
    with pytest.raises(KeyboardInterrupt) as caught, DeferSigint():
        strike()
        raise ValueError("inside")
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_the_users_own_handler_is_theirs_again(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with DeferSigint():
            strike()
        assert signal.getsignal(signal.SIGINT) == handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_leave_handlers_alone():
    seen = []

    def look():
        with DeferSigint():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [signal.getsignal(signal.SIGINT)]
