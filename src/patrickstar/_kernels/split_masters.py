"""Masters of bfloat16 parameters as the parameter and 16 further bits."""

import torch

from patrickstar._kernels.rounding import round_into

# [Note: split masters]
# A parameter in bfloat16 is its fp32 master, rounded to nearest. So with both of them its 16 bits are stored twice.
# A split master is the parameter and the lower 16 bits of the master: the upper ones are those of the parameter if the
# lower ones are less than a half (0x8000) and were rounded away, one less if they are more and were rounded up. If they
# are exactly a half, the parameter is even, as ties go to even, and it may have been rounded either way: 65,537 masters
# round to an even parameter, one more than 16 bits tell apart. The one that is rounded up from an odd number is marked
# in the sign of Adam's second moment, which is never negative. It is one number in 131,072 at random.
#
# Example: the master 0x3f7f8001 is rounded up to 0x3f80, and its lower half is 0x8001; so its upper half is 0x3f7f. The
# masters 0x3f7f8000 and 0x3f808000 are both ties that go to 0x3f80; the first is marked.
#
# Every NaN is the quiet one without payload, as an update stores it: another one would not come back.

HALF = 0x8000
"""Lower half of a master between two parameters, as far from one as from the other."""
SIGN = torch.iinfo(torch.int32).min
"""Sign bit of fp32."""


def joined_masters(upper: torch.Tensor, lower: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """Return the masters of parameters as a new fp32 tensor.

    Args:
        upper: The parameters, bfloat16, flat.
        lower: The lower halves of their masters, int16.
        marked: Second moments, fp32, with the marks of ties.
    """
    halves = lower.to(torch.int32) & 0xFFFF
    rounded_up = (halves > HALF) | ((halves == HALF) & (marked.view(torch.int32) < 0))
    words = upper.view(torch.int16).to(torch.int32) - rounded_up.to(torch.int32)
    return ((words << 16) | halves).view(torch.float32)


def magnitudes(marked: torch.Tensor) -> torch.Tensor:
    """Return second moments without the marks of ties, as a new tensor."""
    return (marked.view(torch.int32) & ~SIGN).view(torch.float32)


def with_marks(moments: torch.Tensor, marked: torch.Tensor) -> torch.Tensor:
    """Return second moments with the marks of others, as a new tensor."""
    return (moments.view(torch.int32) | (marked.view(torch.int32) & SIGN)).view(torch.float32)


def split_masters(
    masters: torch.Tensor, moments: torch.Tensor, upper: torch.Tensor, lower: torch.Tensor, marked: torch.Tensor
) -> None:
    """Store masters, whose NaNs are canonical, as parameters and lower halves, and second moments with marks of ties.

    Args:
        masters: fp32, flat and contiguous.
        moments: Second moments, fp32 and not negative.
        upper: Receives the parameters, bfloat16.
        lower: Receives the lower halves, int16.
        marked: Receives the second moments; may be `moments`.
    """
    round_into(upper, masters)
    words = masters.view(torch.int32)
    lower.copy_(words.view(torch.int16)[::2])  # the machine is little-endian, as Triton's and PyTorch's GPUs are
    ties = ((words & 0xFFFF) == HALF) & ((words & (HALF << 1)) != 0)
    marked.view(torch.int32).copy_(moments.view(torch.int32) | (ties.to(torch.int32) << 31))
