"""Errors in the words of the command line."""

import pytest

from patrickstar._cli.option_words import in_options
from patrickstar._layout.byte_size import parse_size


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("enough: device_memory='14MiB'; host_memory='74MiB'", "enough: --device-memory 14MiB; --host-memory 74MiB"),
        ("try device_memory=5242881 bytes (5.00 MiB) with", "try --device-memory 6MiB with"),
        ("host_memory=3000 bytes (2.93 KiB), for buffers", "--host-memory 3KiB, for buffers"),
        ("device_memory=12 with", "--device-memory 12B with"),
        ("alone: disk=ps.Disk(directory); activation_offload=True", "alone: --disk DIRECTORY; --activation-offload"),
        ("add a disk: ps.Config(disk=ps.Disk(directory))", "add a disk: --disk DIRECTORY"),
        ("activation_checkpointing=True", "--activation-checkpointing"),
        ("the model data of 987928281088 bytes (920.08 GiB) do not fit", "the model data of 920.08 GiB do not fit"),
        ("lower host_memory, or set both", "lower --host-memory, or set both"),
        ("4 processes can't be divided into replicas=3", "4 processes can't be divided into --replicas 3"),
        ("--device-memory: '64' has no unit", "--device-memory: '64' has no unit"),
    ],
)
def test_the_words_of_the_library_become_options(message, says):
    assert in_options(message) == says
    assert in_options(says) == says


def test_a_size_to_type_is_no_smaller_than_the_one_that_suffices():
    for nbytes in (1, 1023, 1025, (1 << 20) + 1, 10**9 + 7):
        option, size = in_options(f"device_memory={nbytes} bytes").split()
        assert option == "--device-memory" and parse_size(size) >= nbytes
