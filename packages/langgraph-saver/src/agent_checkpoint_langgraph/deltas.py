"""Differences between two serialised values, and the value back from a chain of them.

A difference is a list of hunks: so many bytes of the older value from an
offset, then so many new ones. It is found by running along both values and,
where they part, looking a little further for where they meet again: what grows
at its end, and whose length stands at its beginning, costs its growth.
"""

from __future__ import annotations

from itertools import chain
from struct import Struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    Wanted = list[tuple[int, int, int]]
    """Ranges to fill: where in the result, from where in the older value, how many bytes."""

    Pieces = list[tuple[int, memoryview]]
    """Parts of the result, and where they stand in it."""

# How many hunks; for each: offset in the older value, bytes from there, new bytes.
COUNT = Struct("<I")
HUNK = Struct("<III")
# So many equal bytes are taken for the same place.
PROBE = 12
# How far ahead in the newer value the same place is looked for: near first, which nearly always finds it.
WINDOWS = (256, 65_536)
# More hunks than these are no difference but another value.
MOST_HUNKS = 128
# Where a run ends is looked for in steps that grow from here to there, and shrink again.
SMALLEST_STEP = 64
LARGEST_STEP = 65_536
# What a difference costs beside its bytes, when it is weighed against a full copy: a row, and its reading.
ROW_COST = 64


def difference(old: bytes, new: bytes) -> bytes | None:
    """What makes ``new`` of ``old``; None where that is no gain."""
    hunks: list[tuple[int, int, int]] = []
    added: list[bytes] = []
    size, at, here = 0, 0, 0
    while here < len(new) or not hunks:
        run = _common(old, at, new, here)
        parted_at, parted = at + run, here + run
        met = _meet(old, parted_at, new, parted) if parted < len(new) else None
        next_at, next_here = met or (len(old), len(new))
        hunks.append((at, run, next_here - parted))
        added.append(new[parted:next_here])
        size += HUNK.size + next_here - parted
        at, here = next_at, next_here
        if len(hunks) > MOST_HUNKS or size >= len(new):
            return None
    packed = (HUNK.pack(*hunk) for hunk in hunks)
    return b"".join(chain((COUNT.pack(len(hunks)),), packed, added))


def restored(full: bytes, differences: Sequence[bytes]) -> bytes:
    """The newest value of a chain: its full copy, and the differences from the newest to the oldest."""
    if not differences:
        return full
    size = sum(run + count for _, _, run, count, _ in _hunks(differences[0]))
    pieces: Pieces = []
    wanted: Wanted = [(0, 0, size)]
    for each in differences:
        wanted = _take(pieces, wanted, each)
    whole = memoryview(full)
    pieces += [(into, whole[start : start + length]) for into, start, length in wanted]
    return b"".join(piece for _, piece in sorted(pieces, key=_place))


def _take(pieces: Pieces, wanted: Wanted, difference: bytes) -> Wanted:
    """Take the pieces that this difference brings; what is wanted of the value before it."""
    left: Wanted = []
    new = memoryview(difference)
    hunks = _hunks(difference)
    position, offset, run, count, new_at = next(hunks)
    for into, start, length in wanted:
        while length:
            while start >= position + run + count:
                position, offset, run, count, new_at = next(hunks)
            skip = start - position
            if skip < run:
                taken = min(run - skip, length)
                left.append((into, offset + skip, taken))
            else:
                skip -= run
                taken = min(count - skip, length)
                pieces.append((into, new[new_at + skip : new_at + skip + taken]))
            into, start, length = into + taken, start + taken, length - taken
    return left


def _place(piece: tuple[int, memoryview]) -> int:
    return piece[0]


def _hunks(difference: bytes) -> Iterator[tuple[int, int, int, int, int]]:
    """For each hunk: where it begins in the newer value, offset, run, number of new bytes and where they stand."""
    (count,) = COUNT.unpack_from(difference)
    end = COUNT.size + count * HUNK.size
    position, new_at = 0, end
    for offset, run, new in HUNK.iter_unpack(difference[COUNT.size : end]):
        yield position, offset, run, new, new_at
        position, new_at = position + run + new, new_at + new


def _common(old: bytes, at: int, new: bytes, here: int) -> int:
    """How many bytes are the same from there on."""
    most = min(len(old) - at, len(new) - here)
    whole = memoryview(old)  # whose parts are not copied
    if new.startswith(whole[at : at + most], here):
        return most
    run, step, largest = 0, SMALLEST_STEP, LARGEST_STEP
    while True:
        step = min(step, most - run)
        if new.startswith(whole[at + run : at + run + step], here + run):
            run += step
            step = min(step * 8, largest)
        elif step > SMALLEST_STEP:
            step = largest = max(SMALLEST_STEP, step // 8)
        else:
            return run + _common_here(old[at + run : at + run + step], new[here + run : here + run + step])


def _common_here(old: bytes, new: bytes) -> int:
    """The same for a few bytes, which are numbers whose first bits are the same."""
    differing = int.from_bytes(old, "big") ^ int.from_bytes(new, "big")
    return len(old) - (differing.bit_length() + 7) // 8


def _meet(old: bytes, at: int, new: bytes, here: int) -> tuple[int, int] | None:
    """The next place in both that is the same, from two places that differ."""
    for window in WINDOWS:
        skip = 0
        while at + skip + PROBE <= len(old) and (skip < window or window == WINDOWS[-1]):
            found = new.find(old[at + skip : at + skip + PROBE], here, here + window)
            if found >= 0:
                return _back(old, at, at + skip, new, here, found)
            skip += 1 + skip // 4
    return None


def _back(old: bytes, first_at: int, at: int, new: bytes, first: int, here: int) -> tuple[int, int]:
    """Where the sameness that holds at two places begins."""
    while at > first_at and here > first and old[at - 1] == new[here - 1]:
        at, here = at - 1, here - 1
    return at, here
