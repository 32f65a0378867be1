"""Experts: the expected load of the busiest process, and feed-forward networks in parts."""

import math

import numpy as np
import pytest
from hypothesis import strategies as st
from sampling import fixed_draws

from patrickstar._perf_model.experts import FeedForward, expected_maximum

given = fixed_draws(100)


@given(st.floats(1e-3, 1e6))
def test_one_process_has_the_mean_load(mean):
    assert expected_maximum(mean, 1) == pytest.approx(mean, rel=1e-9)


@given(st.floats(1e-3, 1e6), st.integers(1, 2000))
def test_the_busiest_process_has_more_tokens_the_more_processes_there_are(mean, bins):
    few, more = expected_maximum(mean, bins), expected_maximum(mean, bins + 1)
    assert mean * (1 - 1e-9) <= few <= more * (1 + 1e-12)


@given(st.floats(0.01, 50))
def test_the_maximum_of_two_is_the_sum_over_all_pairs_of_counts(mean):
    counts = np.arange(0, 200)
    log_probability = counts * math.log(mean) - mean - np.array([math.lgamma(count + 1) for count in counts])
    probability = np.exp(log_probability)
    larger = np.maximum.outer(counts, counts)
    assert expected_maximum(mean, 2) == pytest.approx(float(probability @ larger @ probability), rel=1e-9)


@pytest.mark.parametrize(("tokens", "experts"), [(2048, 8), (65_536, 64), (1000, 256)])
def test_uniform_routing_of_a_fixed_number_of_tokens_has_nearly_this_maximum(tokens, experts):
    counts = np.random.default_rng(20260518).multinomial(tokens, [1 / experts] * experts, size=4000)
    measured = counts.max(axis=1)
    error = measured.std() / math.sqrt(len(measured))
    expected = expected_maximum(tokens / experts, experts)
    # The fixed sum lowers the maximum: by less than a standard deviation of the mean of all counts.
    assert measured.mean() - 5 * error <= expected <= measured.mean() + math.sqrt(tokens) / experts + 5 * error


def test_large_means_have_the_maximum_of_normal_variables():
    mean, bins = 1e6, 768
    # The median of the maximum is near sqrt(2 ln n) standard deviations, from below for such n.
    assert mean + 2.5 * math.sqrt(mean) < expected_maximum(mean, bins) < mean + math.sqrt(2 * mean * math.log(bins))


@given(st.integers(1, 64), st.integers(1, 64), st.booleans(), st.sampled_from([1, 2, 4, 8]))
def test_parts_of_a_feed_forward_network_are_the_whole_and_copies_of_one_bias(hidden, units, biases, tp):
    network = FeedForward(8 * hidden, 8 * units, biases, saved_bytes_per_unit=4)
    assert tp * network.numel(tp) == network.numel() + (tp - 1) * (network.hidden if biases else 0)
    assert tp * network.saved_bytes(tp) == network.saved_bytes()
    assert network.operations(3) == 3 * 2 * 2 * network.hidden * network.ffn
