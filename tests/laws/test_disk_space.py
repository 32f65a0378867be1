"""Law 6 with a disk that is too small, or an unusable directory: a clear error, and nothing is left behind."""

import gc
import re
import resource

import pytest
from toys import mean_square, train

import patrickstar as ps
from patrickstar.errors import BudgetError, DiskError

from .tiers import (
    Room,
    blocks,
    files_no_larger_than,
    inputs,
    on_disk,
    open_files,
    options,
    small_engine,
    worker_threads,
)


@pytest.fixture
def config(tmp_path):
    return on_disk(blocks, options(), tmp_path, inputs(1)[0], Room(host_bytes=20000))


def refused(config, kind):
    """Return the error message of creating an engine; check that nothing is left of it."""
    before = open_files()
    with pytest.raises(kind) as raised:
        small_engine(blocks, config)
    text = str(raised.value)
    del raised
    gc.collect()
    assert worker_threads() == [] and open_files() == before
    return text


def test_a_disk_without_space_for_the_swap_file(config, tmp_path):
    with files_no_larger_than(100000):
        text = refused(config, DiskError)
    assert re.match(
        rf"the file needs \d+ more bytes .* on the disk, and {tmp_path} has \d+ bytes.*File too large", text
    )
    assert not list(tmp_path.iterdir())


def test_directories_that_cannot_be_used(config, tmp_path):
    (tmp_path / "taken").write_text("")
    for directory in (tmp_path / "none", tmp_path / "taken"):
        text = refused(config.model_copy(update={"disk": ps.Disk(directory=directory)}), DiskError)
        assert text.startswith(f"the disk tier's directory {directory} "), text
    # Not even root can create files there, and it reports no free space.
    text = refused(config.model_copy(update={"disk": ps.Disk(directory="/sys")}), (DiskError, BudgetError))
    assert "disk" in text
    text = refused(config.model_copy(update={"disk": ps.Disk(directory="/sys", capacity="1GiB")}), DiskError)
    assert re.match(r"the disk tier's directory /sys can't be written", text)


@pytest.mark.parametrize("how", ["capacity", "system"])
def test_no_room_for_accumulated_gradients(config, tmp_path, how):
    """Gradient lists may need more disk space during training."""
    before = open_files()
    used = 0
    if how == "capacity":
        unlimited = small_engine(blocks, config)
        used = unlimited.inspect().disk.nbytes
        unlimited.close()
        config = config.model_copy(update={"disk": ps.Disk(directory=tmp_path, capacity=used)})
    engine = small_engine(blocks, config)
    limit = files_no_larger_than(engine.inspect().disk.nbytes if how == "system" else resource.RLIM_INFINITY)
    kind = BudgetError if how == "capacity" else DiskError
    with limit, pytest.raises(kind, match=r"grad32\[\d+\]") as raised:
        for batch in inputs(2):
            engine.backward(mean_square(engine(*batch)))
    del raised
    if how == "capacity":
        engine.optimizer.zero_grad()
        train(engine, inputs(4))
    engine.close()
    assert worker_threads() == [] and open_files() == before and not list(tmp_path.iterdir())
