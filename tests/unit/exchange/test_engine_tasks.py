"""What is decided before the first step: the tasks of each lane, and where buckets are cut."""

from collections import Counter
from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire.core.launch import launch_tasks, tasks_by_lane
from gradwire.exchange.exchange import PhaseTask, _Progress
from gradwire.exchange.layout import cut


def task_lists(
    launch: list[tuple[int, str]], chunks: list[int], lanes: int, skew: bool, gate: int | None = None
) -> list[list[PhaseTask]]:
    """The tasks of each lane."""
    return [[PhaseTask(*task) for task in tasks] for tasks in tasks_by_lane(launch_tasks(launch, chunks, skew, gate), lanes)]


LINK_TASKS = [("allreduce",), ("allgather",), ("alltoall", "allgather")]


@st.composite
def launches(draw: st.DrawFn) -> tuple[list[tuple[int, str]], list[int]]:
    """A launch order that keeps each bucket's own order, and the pieces of each bucket."""
    tasks = draw(st.lists(st.sampled_from(LINK_TASKS), min_size=1, max_size=6))
    turns = draw(st.permutations([bucket for bucket, words in enumerate(tasks) for _ in words]))
    done = [0] * len(tasks)
    launch = []
    for bucket in turns:
        launch.append((bucket, tasks[bucket][done[bucket]]))
        done[bucket] += 1
    chunks = [draw(st.integers(1, 5)) if len(words) > 1 or words[0] == "allgather" else 1 for words in tasks]
    return launch, chunks


@given(launches(), st.integers(1, 3), st.booleans())
def test_every_phase_of_every_piece_is_done_once_and_in_order(
    given_launch: tuple[list[tuple[int, str]], list[int]], lanes: int, skew: bool
) -> None:
    launch, chunks = given_launch
    phases = {bucket: sum(index == bucket for index, _ in launch) for bucket, _ in launch}
    lists = task_lists(launch, chunks, lanes, skew and lanes == 1)
    assert len(lists) == lanes
    done = [task for tasks in lists for task in tasks]
    assert len(done) == len(set(done))
    assert set(done) == {
        PhaseTask(bucket, chunk, phase)
        for bucket in range(len(chunks))
        for chunk in range(chunks[bucket])
        for phase in range(phases[bucket])
    }
    for bucket in range(len(chunks)):
        for chunk in range(chunks[bucket]):
            (lane,) = {i for i, tasks in enumerate(lists) for t in tasks if (t.bucket, t.chunk) == (bucket, chunk)}
            own = [t.phase for t in lists[lane] if (t.bucket, t.chunk) == (bucket, chunk)]
            assert own == sorted(own), "a piece's phases run out of order"


@given(launches(), st.integers(1, 3), st.booleans(), st.integers(0, 12))
def test_no_lane_passes_the_gate_early(
    given_launch: tuple[list[tuple[int, str]], list[int]], lanes: int, skew: bool, gate: int
) -> None:
    """What is launched behind the gate comes last on every lane, and nothing is lost or done twice."""
    launch, chunks = given_launch
    lists = task_lists(launch, chunks, lanes, skew and lanes == 1, gate)
    before = Counter(bucket for bucket, _ in launch[:gate])
    for tasks in lists:
        behind = [task.phase >= before[task.bucket] for task in tasks]
        assert behind == sorted(behind)
    whole = task_lists(launch, chunks, 1, skew=False)[0]
    assert sorted((t for tasks in lists for t in tasks), key=str) == sorted(whole, key=str)


@given(launches(), st.integers(1, 3))
def test_lanes_keep_the_launch_order(given_launch: tuple[list[tuple[int, str]], list[int]], lanes: int) -> None:
    launch, chunks = given_launch
    (whole,) = task_lists(launch, chunks, 1, skew=False)
    position = {task: at for at, task in enumerate(whole)}
    for tasks in task_lists(launch, chunks, lanes, skew=False):
        assert [position[task] for task in tasks] == sorted(position[task] for task in tasks)
    first_seen = [bucket for bucket, _ in groupby(task.bucket for task in whole)]
    assert first_seen == [bucket for bucket, _ in groupby(bucket for bucket, _ in launch)]


def test_skew_puts_a_gather_behind_the_reduce_of_the_next_piece() -> None:
    (tasks,) = task_lists([(0, "alltoall"), (0, "allgather")], chunks=[3], lanes=1, skew=True)
    assert [(task.chunk, task.phase) for task in tasks] == [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (2, 1)]


def test_skew_never_lets_a_bucket_wait_for_the_next_one() -> None:
    launch = [(0, "alltoall"), (0, "allgather"), (1, "alltoall"), (1, "allgather")]
    (tasks,) = task_lists(launch, chunks=[1, 1], lanes=1, skew=True)
    assert [(task.bucket, task.phase) for task in tasks] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_two_lanes_share_the_pieces() -> None:
    first, second = task_lists([(0, "alltoall"), (0, "allgather")], chunks=[4], lanes=2, skew=False)
    assert [task.chunk for task in first] == [0, 0, 2, 2]
    assert [task.chunk for task in second] == [1, 1, 3, 3]


def is_allowed(numels: list[int], granularity: int, edge: int) -> bool:
    begin = 0
    for numel in numels:
        if begin <= edge <= begin + numel and (edge == begin + numel or (edge - begin) % granularity == 0):
            return True
        begin += numel
    return edge == 0


TENSORS = st.lists(st.one_of(st.sampled_from([0, 1, 7, 123, 128, 4097]), st.integers(0, 3000)), min_size=1, max_size=8)


@given(TENSORS, st.sampled_from([1, 32, 128, 1024]), st.integers(1, 9))
def test_a_cut_is_at_block_borders_in_order_and_even(numels: list[int], granularity: int, parts: int) -> None:
    total = sum(numels)
    edges = cut(numels, granularity, 0, total, parts)
    assert len(edges) == parts + 1
    assert (edges[0], edges[-1]) == (0, total)
    assert edges == sorted(edges)
    for edge in edges:
        assert is_allowed(numels, granularity, edge)
    for low, high in pairwise(edges):
        assert abs((high - low) - total / parts) <= granularity + 1


@given(TENSORS, st.sampled_from([1, 32, 128]), st.integers(1, 5), st.integers(1, 4))
def test_shards_of_chunks_are_cut_the_same_way(numels: list[int], granularity: int, chunks: int, world_size: int) -> None:
    for start, end in pairwise(cut(numels, granularity, 0, sum(numels), chunks)):
        shards = cut(numels, granularity, start, end, world_size)
        assert (shards[0], shards[-1]) == (start, end)
        assert shards == sorted(shards)
        for edge in shards:
            assert is_allowed(numels, granularity, edge)
        for low, high in pairwise(shards):
            assert abs((high - low) - (end - start) / world_size) <= granularity + 1


@pytest.mark.parametrize(
    ("numels", "granularity", "parts", "edges"),
    [
        ([1], 128, 2, [0, 0, 1]),
        ([7], 1, 3, [0, 2, 4, 7]),
        ([256], 128, 2, [0, 128, 256]),
        ([200, 200], 128, 2, [0, 200, 400]),
        ([0, 5, 0], 128, 2, [0, 0, 5]),
        ([2**20 + 1], 128, 2, [0, 2**19, 2**20 + 1]),
    ],
)
def test_cuts_that_can_be_checked_by_hand(numels: list[int], granularity: int, parts: int, edges: list[int]) -> None:
    got = cut(numels, granularity, 0, sum(numels), parts)
    assert len(got) == len(edges)
    assert got == edges


def test_whoever_a_failure_wakes_finds_it_recorded() -> None:
    progress, recorded = _Progress(1, [1]), []
    for waited_for in (progress.done[0], progress.at_gate):
        waited_for.add_done_callback(lambda _: recorded.append(progress.failed.done()))
    progress.fail()
    assert recorded == [True, True]
