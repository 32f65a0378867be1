"""Device memory of a traced step: what is needed at one moment, not the sum of peaks of different ones."""

from patrickstar._dry_run.traced_workload import device_bytes
from patrickstar._schedule.trace import Moment, Trace


def test_parameters_are_counted_beside_the_activations_of_their_own_time():
    nbytes = {0: 1000, 1: 10, 2: 20}
    moments = [Moment((0,), 5), Moment((), 6), Moment((1,), 500), Moment((), 700), Moment((2,), 40), Moment((1, 2), 30)]
    assert device_bytes(Trace(moments), nbytes) == 5 + 1000 + 10, "with what is used next, which is fetched beside"
    assert device_bytes(Trace(moments[1:]), nbytes) == 700 + 20
    assert device_bytes(Trace(moments[4:]), nbytes) == 40 + 20 + 10
    assert device_bytes(Trace([Moment((), 3)]), nbytes) == 3
