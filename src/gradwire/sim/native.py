"""The planner's inner loops in C++ (csrc/planner.cpp), called through ctypes.

The library has the timelines of `gradwire.sim.replay`, the searches on them, and the search for the best fusion. It is some
hundred times as fast as Python, with the same result to the last bit. Where the library was not built, Python does the work.
"""

import ctypes
from array import array
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

from gradwire.core import native
from gradwire.errors import PlanError
from gradwire.sim.events import INTER

_ABOVE_LIMIT, _TOO_LONG, _NO_MEMORY = -1, -2, -3
_LONGEST = 2**62
"""Most femtoseconds of a step, over an hour. Longer steps are left to Python, whose integers are unbounded."""


class ReplayProgram(NamedTuple):
    """The tasks of one bucket, on resources of `gradwire.sim.events`, in femtoseconds."""

    tasks: tuple[tuple[int, int, int, int], ...]
    """The tasks in order: (resource, length, urgency, link task). The link task with this index has their launch order."""
    links: tuple[int, ...]
    """The link of each link task."""
    busy: tuple[int, int, int, int]
    """Femtoseconds on each resource."""
    codecs: int
    """Comp and Decomp tasks."""


class TooLongError(Exception):
    """A step may take more femtoseconds than 64 bits hold: use the Python search instead."""


@cache
def _library() -> ctypes.CDLL | None:
    try:
        library = native.library()
    except OSError:
        return None
    library.gw_line.restype = ctypes.c_void_p
    library.gw_free.argtypes = [ctypes.c_void_p]
    for name in ("gw_step", "gw_select", "gw_offload"):
        getattr(library, name).restype = ctypes.c_int64
    return library


def native_fusion(
    ready: Sequence[float], sent: Sequence[float], first_us: float, second_us: float, mirrored: bool, decode_us: Sequence[float]
) -> list[int] | None:
    """Boundaries of the best fusion, as `gradwire.planner.fusion` finds them; None where the library was not built.

    ready, sent, first_us, second_us, mirrored: a chain of that module. decode_us: of the last bucket, by its first tensor.
    """
    library = _library()
    if library is None:
        return None
    count = len(decode_us)
    boundaries = _ints([0] * count)
    constants = ctypes.c_double(first_us), ctypes.c_double(second_us)
    given = (_doubles(ready), _doubles(sent), count, *constants, mirrored, _doubles(decode_us))
    buckets: int = library.gw_fuse(*given, boundaries)
    return list(boundaries)[:buckets]


def native_line(after: Sequence[int], workers: int) -> "Native | None":
    """The C++ version of a Replayer; None where the library was not built, or if the times are too long for it."""
    library = _library()
    if library is None or after[-1] >= _LONGEST:
        return None
    return Native(library, after, workers)


class Native:
    """One model's computation, and every program used so far."""

    def __init__(self, library: ctypes.CDLL, after: Sequence[int], workers: int) -> None:
        self._library = library
        self._line = ctypes.c_void_p(library.gw_line(_longs(after), len(after), workers))
        self._numbers: dict[int, int] = {}
        self._kept: list[ReplayProgram] = []  # alive, so that no other program gets the same id

    def __del__(self) -> None:
        self._library.gw_free(self._line)

    def step(self, programs: Sequence[ReplayProgram], releases: Sequence[int], skew: int, limit: int) -> int | None:
        """Femtoseconds, or None above `limit`. Raises TooLongError."""
        numbers = self._all(programs)
        count = len(programs)
        found: int = self._library.gw_step(
            self._line, numbers, _ints(releases), count, skew, ctypes.c_int64(min(limit, _LONGEST))
        )
        if found == _TOO_LONG:
            raise TooLongError
        return None if found == _ABOVE_LIMIT else found

    def select(
        self,
        tables: Sequence[Sequence[ReplayProgram]],
        sizes: Sequence[int],
        order: Sequence[int],
        skew: int,
        prune: bool,
        looks: int | None,
    ) -> tuple[list[int], int, list[int], list[int], list[int]]:
        """Algorithm 1: chosen options, step, begins, ends, and the counts of candidates, simulated and ruled out.

        sizes: numbers from 0 on, equal for equal sizes. order: the order of the visits. Raises TooLongError, and PlanError
        without enough memory.
        """
        count, width = len(tables), max(map(len, tables))
        rows: dict[int, list[int]] = {}
        for table in tables:
            if id(table) not in rows:
                rows[id(table)] = [self._number(program) for program in table] + [-1] * (width - len(table))
        numbers = _ints([number for table in tables for number in rows[id(table)]])
        chosen, begins, ends, counts = _ints([0] * count), _longs([0] * count), _longs([0] * count), _longs([0] * 3)
        found = (chosen, begins, ends, counts)
        cut = -1 if looks is None else looks
        step: int = self._library.gw_select(
            self._line, numbers, count, width, _ints(sizes), _ints(order), len(order), skew, prune, cut, *found
        )
        _check(step, count)
        return list(chosen), step, list(begins), list(ends), list(counts)

    def offload(
        self,
        programs: Sequence[ReplayProgram],
        moved: Sequence[ReplayProgram | None],
        members: Sequence[Sequence[int]],
        skew: int,
        exhaustive: bool,
    ) -> tuple[list[int], int, list[int], list[int], int]:
        """Algorithm 2: counts by group, step, begins, ends, and the number of simulated steps.

        moved: None for a tensor that stays. members: tensors of each group, ascending. Raises TooLongError, and PlanError
        without enough memory.
        """
        count, groups = len(programs), len(members)
        numbers = self._all(programs)
        elsewhere = _ints([-1 if program is None else self._number(program) for program in moved])
        flat = _ints([tensor for group in members for tensor in group])
        until = _ints(list(accumulate(map(len, members))))
        counts, begins, ends, simulated = _ints([0] * groups), _longs([0] * count), _longs([0] * count), _longs([0])
        found = (counts, begins, ends, simulated)
        step: int = self._library.gw_offload(self._line, numbers, elsewhere, count, flat, until, groups, skew, exhaustive, *found)
        _check(step, count)
        return list(counts), step, list(begins), list(ends), simulated[0]

    def _all(self, programs: Sequence[ReplayProgram]) -> "ctypes.Array[ctypes.c_int32]":
        return _ints([self._number(program) for program in programs])

    def _number(self, program: ReplayProgram) -> int:
        number = self._numbers.get(id(program))
        if number is None:
            # of a program that no step has time for, it is enough to know that
            own = program.tasks if sum(program.busy) < _LONGEST else ((INTER, _LONGEST, 0, 0),)
            tasks = _longs([value for task in own for value in task])
            number = self._library.gw_add(self._line, tasks, len(own), program.codecs)
            self._numbers[id(program)] = number
            self._kept.append(program)
        return number


def _check(step: int, tensors: int) -> None:
    if step == _TOO_LONG:
        raise TooLongError
    if step == _NO_MEMORY:
        raise PlanError(
            f"ByteComp's search among {tensors} tensors needs more memory than this process may have: it keeps the state of a "
            "step for each tensor. Use another method, such as --method fusion, or allow more memory (ulimit -v)."
        )


def _doubles(values: Sequence[float]) -> "ctypes.Array[ctypes.c_double]":
    held = array("d", values)
    return (ctypes.c_double * len(held)).from_buffer(held)


def _longs(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int64]":
    held = array("q", values)
    return (ctypes.c_int64 * len(held)).from_buffer(held)


def _ints(values: Sequence[int]) -> "ctypes.Array[ctypes.c_int32]":
    held = array("i", values)
    return (ctypes.c_int32 * len(held)).from_buffer(held)
