"""The control exchange: what ranks report to each other at the end of a step, and how many messages that takes."""

from typing import Any
from unittest import mock

import torch.distributed as dist
from threads import Threads, here
from worlds import Given, Worlds

import gradwire as gw
from gradwire.engine import control
from gradwire.transport import MergedValues, merge_rounds
from gradwire.transport.messages import Messages

COLLECTIVE_TAGS = 2**40
"""Messages with larger tags are no reports."""


def step_with_a_changed_report(at_message: int) -> str:
    """Rank 0's control message number `at_message` is changed on its way to rank 1; what a rank is told, within a few steps."""
    model = Given([300])
    handle = gw.parallelize(model, plan=gw.Uniform(gw.Identity()))
    send, sent = Messages.send_bytes, [0]

    def changed(self: Messages, what: bytes, to: int, tag: int) -> Any:
        sent[0] += tag < COLLECTIVE_TAGS
        if tag < COLLECTIVE_TAGS and sent[0] == at_message and dist.get_rank() == 0:
            what = what[:33] + bytes([what[33] ^ 4]) + what[34:]
        return send(self, what, to, tag)

    Messages.send_bytes = changed  # type: ignore[method-assign]
    try:
        for _ in range(3):
            model(model.random_gradients(1)).backward()
    except gw.CommunicationError as error:
        return str(error)
    finally:
        Messages.send_bytes = send  # type: ignore[method-assign]
        handle.detach()
    return ""


def test_a_report_that_was_changed_on_the_way_is_no_report(worlds: Worlds) -> None:
    first, second = worlds.run(2, step_with_a_changed_report, 3)
    assert "bytes of the control exchange at the end of backward, after bucket 0" in second
    assert "changed on their way from rank 0 to rank 1: the checksum of what ranks tell each other does not fit" in second
    assert "step 2: rank 0 waited for" in first and "rank 1 says: step 1" in first


class Counted:
    """A link's backend that counts what is sent."""

    def __init__(self, backend: Any) -> None:
        self._backend, self.sent = backend, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def send_bytes(self, *arguments: Any) -> Any:
        self.sent += 1
        return self._backend.send_bytes(*arguments)


def messages_of_steps(left_at: int) -> tuple[list[int], list[str]]:
    """The control messages of each of four steps, with a step that rank 1 leaves; and what the steps told."""
    model = Given([30, 7])
    handle = gw.parallelize(model, plan=gw.Uniform(gw.Identity()), process_group=here.group)
    link = handle.session.lanes.control.link
    link.backend = counted = Counted(link.backend)
    messages, told = [], []
    for step in range(4):
        counted.sent = 0
        try:
            if step == left_at and here.rank == 1:
                model.p0.register_hook(lambda gradient: 1 // 0)
            model(model.random_gradients(here.rank, step)).backward()
        except (gw.StepStateError, ZeroDivisionError) as error:
            told.append(str(error))
            model.p0._backward_hooks = None
            messages.append(counted.sent)
            handle.reset()
            continue
        messages.append(counted.sent)
    handle.detach()
    return messages, told


def test_a_step_takes_few_messages_and_asks_who_differs_only_where_ranks_differ(threads: Threads) -> None:
    ranks = 17
    for rank, (messages, told) in enumerate(threads.run(ranks, messages_of_steps, -1)):
        few = sum(len(each.targets) for each in merge_rounds(rank, ranks))
        assert messages == [2 * few, few, few, few] and few <= 9 and not told  # first also the weights of batches


def test_ranks_that_differ_are_named(threads: Threads) -> None:
    for rank, (messages, told) in enumerate(threads.run(3, messages_of_steps, 2)):
        assert len(told) == 1 and (rank == 1 or "step 2 is void on all ranks: rank 1 left it after" in told[0]), told
        assert messages[:2] == [4, 2] and messages[3] == 2 and (rank == 1 or messages[2] == 4)


def test_ranks_that_differ_are_asked_with_few_messages_too(threads: Threads) -> None:
    ranks = 17
    for rank, (messages, told) in enumerate(threads.run(ranks, messages_of_steps, 2)):
        few = sum(len(each.targets) for each in merge_rounds(rank, ranks))
        assert len(told) == 1 and (rank == 1 or "step 2 is void on all ranks: rank 1 left it after" in told[0]), told
        assert messages[1:] == [few, messages[2], few] and (rank == 1 or messages[2] == 2 * few)


def ridden() -> list[Any]:
    """What all ranks gave to be merged with the reports of steps."""
    model = Given([30])
    handle = gw.parallelize(model, plan=gw.Uniform(gw.Identity()), process_group=here.group)
    session, found = handle.session, []
    with mock.patch.object(session.lanes.control.link.backend, "gather", side_effect=AssertionError("a gather")):
        for step in range(6):
            result = None
            if step % 2:
                result = session.ride(MergedValues(b"", (float(here.rank), -float(here.rank)), (1.0, 0.5)))
                assert result() is None
            model(model.random_gradients(here.rank, step)).backward()
            found.append(result and result())
    handle.detach()
    return found


def test_values_ride_with_the_reports_of_a_step(threads: Threads) -> None:
    for found in threads.run(3, ridden):
        assert found == [None, MergedValues(b"", (2.0, 0.0), (3.0, 1.5))] * 3


def test_samples_of_all_ranks_are_added_and_used_parameters_are_any_ranks() -> None:
    merged = MergedValues(bytes([0b101, 0]), (), (6.0,))
    own = control.RankReport(3, control.BackwardState.DONE, 1, 2, False, False, 0, True, 2.0, control.COMPLETE, 1)
    reports = control.RankReports([own] * 3, merged, True)
    assert reports.used == {0, 2} and reports.mean_samples == 2.0 and reports.watched is None
    assert reports.ranks_in(control.BackwardState.DONE) == [0, 1, 2] and reports.ranks_in(control.BackwardState.LEFT) == []
