"""Lossless codec of fp32 pages on disk, which are transferred in 7/8 of their bytes."""

import ctypes

from patrickstar._hardware.direct_io import BLOCK_BYTES
from patrickstar._hardware.vm_pool import round_up
from patrickstar._layout.packed_page import LISTED_SHARE, packed_bytes

# [Note: packed pages]
# Masters and Adam states of neighbors have exponents that are close to each other: of 8 bits they contain about 3. A
# packed page stores sign and significand of each element as they are (3 bytes), and 4 bits of its exponent: how much
# smaller it is than the largest one of its group of 256. Exponents that are smaller by 14 or more are listed whole at
# the end of the page, one in 5,000 of the masters and one in 300 of the second moments of a language model. A zero or
# denormal has a code of its own. So any bits are restored, also of infinities and NaN.
#
# A packed page is as large as `stored_bytes` says, with room for one listed exponent per 64 elements, so that what a
# step transfers can be planned. A page that lists more is larger, at most as large as the unpacked one, which is then
# stored as it is. The place of a page in the swap file does not depend on its size.


class PageCodec:
    """Packs and unpacks fp32 pages in host memory, in the calling thread and without holding the GIL.

    Args:
        library: The compiled kernels, with the functions `patrickstar_pack` and `patrickstar_unpack`.
        variant: Name of an instruction set; None for the fastest one.
    """

    def __init__(self, library: ctypes.CDLL, variant: bytes | None = None) -> None:
        self._library, self._variant = library, variant

    @staticmethod
    def stored_bytes(nbytes: int) -> int:
        """Return the planned bytes on disk of a page of `nbytes`; a page that gains nothing is not packed."""
        return min(nbytes, round_up(packed_bytes(nbytes // 4, LISTED_SHARE), BLOCK_BYTES))

    def pack(self, page: int, nbytes: int, target: int) -> int:
        """Pack the page of `nbytes` at one address into `target`, which has room for as many.

        Returns:
            The bytes to be stored: whole blocks, or `nbytes` if nothing is gained and `target` is to be ignored.
        """
        planned = self.stored_bytes(nbytes)
        if planned == nbytes:
            return nbytes
        packed = int(self._library.patrickstar_pack(page, nbytes // 4, target, nbytes, self._variant))
        return nbytes if packed < 0 else min(nbytes, max(planned, round_up(packed, BLOCK_BYTES)))

    def unpack(self, packed: int, length: int, page: int, nbytes: int) -> bool:
        """Restore the page of `nbytes` from `length` stored bytes. Return False if they do not hold one."""
        status = int(self._library.patrickstar_unpack(packed, length, page, nbytes // 4, self._variant))
        return status == 0
