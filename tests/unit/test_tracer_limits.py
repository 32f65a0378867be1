"""Test what the tracer lets chunks fill: until the step, and beside an accelerator."""

from test_tracer import BUDGET, SHAPE, access, new_tracer

from patrickstar._memory.iteration_mode import Mode


def test_the_last_moment_has_what_is_there_until_the_step():
    """The batch and the loss, what clipping needed, and in a second iteration what is more."""
    tracer = new_tracer()
    for retained, peak in ((40, 90), (60, 60), (10, 30)):
        tracer.begin_iteration("a")
        with tracer.in_iteration():
            for chunks in SHAPE:
                access(tracer, chunks)
        tracer.meter.use(peak)
        tracer.meter.use(retained)
        tracer.end_iteration()
        assert tracer.traces["a"].moments[-1].non_model_bytes == 90
    tracer.begin_iteration("b")
    with tracer.in_iteration():
        for chunks in SHAPE:
            access(tracer, chunks)
    tracer.manager.device_tier.allocations += 1  # the peak may be that of a chunk
    tracer.meter.use(90)
    tracer.meter.use(40)
    tracer.end_iteration()
    assert tracer.traces["b"].moments[-1].non_model_bytes == 40


def test_beside_an_accelerator_no_iteration_fills_what_operators_may_need():
    """The first one may need all; later ones without a trace leave room for the peak that is known."""
    tracer = new_tracer()
    tracer.manager.hardware.has_gpu = True
    device = tracer.manager.device_tier
    tracer.begin_iteration("a")
    access(tracer, (0,), transient=600)
    assert device.soft_limit_bytes == 0
    tracer.end_iteration()
    tracer.begin_iteration("b")
    tracer.meter.use(100)
    tracer.begin_moment((0,), belongs=True)
    assert tracer.mode is Mode.TRACE
    assert device.soft_limit_bytes - device.non_model_bytes == BUDGET - 600
