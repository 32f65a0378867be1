"""Files of checkpoints, written beside the page cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import draws
from xxhash import xxh3_64_hexdigest

from patrickstar._checkpoint.direct_writer import DirectWriter
from patrickstar._hardware.direct_io import BLOCK_BYTES
from patrickstar.errors import CheckpointError

META = torch.device("meta")


@settings(max_examples=draws(40), deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3 * BLOCK_BYTES), st.sampled_from([None, "a", "b"])), max_size=8), st.data())
def test_a_file_holds_what_was_written_until_its_owner_was_released(tmp_path_factory, parts, data):
    tensors = [torch.randint(256, (nbytes,), dtype=torch.uint8) for nbytes, _ in parts]
    expected = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    path = tmp_path_factory.mktemp("file") / "file"
    file = DirectWriter(path, len(expected), page_bytes=2 * BLOCK_BYTES)
    released = data.draw(st.integers(0, len(parts)))
    for number, ((_, owner), tensor) in enumerate(zip(parts, tensors, strict=True)):
        file.write(tensor, owner)
        if owner is None or number == released:
            file.release(owner)
            for (_, other), written in zip(parts[: number + 1], tensors, strict=False):
                if other == owner:
                    written.zero_()  # what was released may change
    file.close()
    assert path.read_bytes() == expected
    pages = [expected[first : first + 2 * BLOCK_BYTES] for first in range(0, len(expected), 2 * BLOCK_BYTES)]
    assert file.sums == [xxh3_64_hexdigest(page) for page in pages]


def test_a_file_that_exists_is_an_error_with_its_size_and_memory_of_other_devices_is_copied_by_pytorch(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"can't write .*/file of 5000 bytes \(4.88 KiB\): File exists"):
        DirectWriter(tmp_path / "file", 5000)
    # Memory of an accelerator that is not CUDA is never read as if it lay on the host: that would end the process.
    file = DirectWriter(tmp_path / "other", 400)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        file.write(torch.empty(100, device=META))
    file.abandon()
