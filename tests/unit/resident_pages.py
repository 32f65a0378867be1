"""The system's account of the pages of a range of addresses."""

from pathlib import Path

import pytest

from patrickstar._hardware.vm_pool import SYSTEM_PAGE, round_up

PAGEMAP = Path("/proc/self/pagemap")


def resident_bytes_at(address: int, nbytes: int) -> int:
    """Return the bytes of pages that the system has for a range, including swapped ones."""
    if not PAGEMAP.exists():
        pytest.skip("this system does not report resident pages")
    with PAGEMAP.open("rb", buffering=0) as file:
        file.seek(address // SYSTEM_PAGE * 8)
        entries = file.read(round_up(nbytes) // SYSTEM_PAGE * 8)
    pages = sum(int.from_bytes(entries[at : at + 8], "little") >> 62 != 0 for at in range(0, len(entries), 8))
    return pages * SYSTEM_PAGE
