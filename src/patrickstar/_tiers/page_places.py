"""Places of pages in a swap file whose pages checkpoints refer to."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from patrickstar._hardware.direct_io import BLOCK_BYTES
from patrickstar._hardware.vm_pool import round_up

# [Note: pages of checkpoints]
# A checkpoint by reference has a link to the swap file, and a list of the pages there that hold its states. So these
# pages are held: new content of such a page is written to another place, which becomes the page's. A place is free
# again once no checkpoint refers to it and its page has moved. The first place of a page is its offset. Pages move at a
# write only, and only if they are held: without checkpoints nothing changes.
#
# A checkpoint no longer exists if its folder is gone and the file has no more links than there are other folders. One
# that was renamed still has its link.


@dataclass(frozen=True)
class HeldPage:
    """Page of a checkpoint: its offset in the swap file as chunks know it, its place, and its bytes unpacked."""

    offset: int
    place: int
    nbytes: int


@dataclass
class HeldPages:
    """Pages of one checkpoint, which is in `folder` once it is `complete`."""

    pages: tuple[HeldPage, ...]
    folder: Path
    complete: bool = False

    @property
    def exists(self) -> bool:
        return not self.complete or self.folder.exists()


class PagePlaces:
    """Maps the offsets of pages to their places, and finds places for new content."""

    def __init__(self) -> None:
        self._moved: dict[int, int] = {}
        """Place of each page that is not in its first one, by offset."""
        self._free: dict[int, list[int]] = {}
        """Free places, by bytes."""
        self._holders: Counter[int] = Counter()
        """Number of checkpoints that refer to each place."""
        self._checkpoints: list[HeldPages] = []

    def of(self, offset: int) -> int:
        """Return the place of a page."""
        return self._moved.get(offset, offset)

    @property
    def folders(self) -> list[Path]:
        """Folders of the checkpoints that hold pages."""
        return [held.folder for held in self._checkpoints]

    def has_place(self, offset: int, nbytes: int) -> bool:
        """Return whether the next content of a page needs no more of the disk."""
        return self.of(offset) not in self._holders or bool(self._free.get(nbytes))

    def renew(self, offset: int, nbytes: int, reserve: Callable[[int], int]) -> int:
        """Return the place for the next content of a page: the old one, unless a checkpoint refers to it.

        Args:
            offset: Offset of the page.
            nbytes: Bytes of the page.
            reserve: Returns a new place of so many bytes, called if no place is free.
        """
        place = self.of(offset)
        if place not in self._holders:
            return place
        free = self._free.get(nbytes)
        self._moved[offset] = place = free.pop() if free else reserve(nbytes)
        return place

    def hold(self, pages: Iterable[tuple[int, int]], folder: Path) -> HeldPages:
        """Keep the content of pages, given by offset and bytes, for a checkpoint that will be in a folder."""
        held = HeldPages(tuple(HeldPage(offset, self.of(offset), nbytes) for offset, nbytes in pages), folder)
        self._holders.update(page.place for page in held.pages)
        self._checkpoints.append(held)
        return held

    def release(self, held: HeldPages) -> None:
        """Let the pages of a checkpoint be written again, unless another one refers to them."""
        self._checkpoints.remove(held)
        for page in held.pages:
            self._holders[page.place] -= 1
            if not self._holders[page.place]:
                del self._holders[page.place]
                if self.of(page.offset) != page.place:
                    self._free.setdefault(page.nbytes, []).append(page.place)

    def gaps(self, nbytes: int) -> Iterator[tuple[int, int]]:
        """Yield offset and bytes of each part of a file of `nbytes` that no checkpoint refers to."""
        held = {page.place: page.nbytes for checkpoint in self._checkpoints for page in checkpoint.pages}
        end = 0
        for place, length in sorted(held.items()):
            if place > end:
                yield end, place - end
            end = place + round_up(length, BLOCK_BYTES)
        if nbytes > end:
            yield end, nbytes - end

    def release_deleted(self, links: int) -> None:
        """Release the pages of checkpoints that no longer exist.

        Args:
            links: Links to the file from checkpoints.
        """
        deleted = [held for held in self._checkpoints if not held.exists]
        if links <= len(self._checkpoints) - len(deleted):
            for held in deleted:
                self.release(held)
