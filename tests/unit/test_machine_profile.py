"""The probe moves what it says, and leaves nothing behind."""

import os
import threading

import pytest

from patrickstar._dry_run.machine_profile import measure_disk
from patrickstar._hardware.worker_pool import THREAD_NAME
from patrickstar.errors import DiskError


def test_a_probe_gives_rates_leaves_no_thread_and_no_file_and_names_a_directory_that_is_not_there(tmp_path):
    rates = measure_disk(tmp_path, chunk_bytes=1 << 20)
    assert rates.read > 0 and rates.write > 0
    assert not os.listdir(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(THREAD_NAME)]
    with pytest.raises(DiskError, match="missing does not exist"):
        measure_disk(tmp_path / "missing")
