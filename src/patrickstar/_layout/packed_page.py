"""Size of a packed page, and the rate at which a core packs; for [Note: packed pages] without torch."""

GROUP = 256
"""Elements with one largest exponent, as in `cpp/packing.h`."""
LISTED_SHARE = 64
"""A planned page has room for one listed exponent per so many elements."""
CODEC_RATE = 3.2e9
"""Unpacked bytes per second that a core packs or unpacks beside computation: in steps of GPT-2 355M on two cores 9.4 GB
took 1.5 s. Alone one did 6 to 9 GB/s with AVX2 or AVX-512."""


def packed_bytes(numel: int, listed_share: int = LISTED_SHARE) -> int:
    """Return the planned bytes of so many packed elements of fp32, before they are rounded to blocks of the disk."""
    return 64 + 3 * numel + -(-numel // GROUP) * (GROUP // 2 + 1) + numel // listed_share
