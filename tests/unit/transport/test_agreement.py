"""Ranks that compare facts: how much they send, and what they raise where facts differ."""

from typing import Any

import pytest

from gradwire.errors import DisagreementError
from gradwire.transport.agreement import KERNELS, Raised, agree
from gradwire.transport.in_process import run_ranks


class Gathers:
    """A link that notes how many bytes are gathered."""

    def __init__(self, group: Any) -> None:
        self._group, self.nbytes = group, list[int]()

    def gather(self, own: bytes) -> list[bytes]:
        self.nbytes.append(len(own))
        gathered: list[bytes] = self._group.gather(own)
        return gathered


def compared(group: Any, odd: dict[str, Any]) -> tuple[Any, list[int]]:
    """The numbers of all ranks, or the error; and the bytes that this rank gave."""
    link: Any = Gathers(group)
    facts = {"version": "1", "model": [[f"layer {at}", [7, at]] for at in range(500)]} | (odd if group.rank == 2 else {})
    try:
        return agree(link, facts, (4, 5, 6), float(group.rank)), link.nbytes
    except DisagreementError as error:
        return str(error), link.nbytes


def test_ranks_that_agree_send_a_digest_of_their_facts() -> None:
    for numbers, nbytes in run_ranks(3, compared, {}):
        assert numbers == [0.0, 1.0, 2.0]
        assert len(nbytes) == 1 and nbytes[0] < 100


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        ({"version": "2"}, "ranks disagree on the version: rank 4 has 1, rank 6 has 2."),
        ({"error": "no memory is left"}, "some of them failed: rank 6: no memory is left"),
    ],
)
def test_where_facts_differ_all_ranks_name_the_difference(odd: dict[str, Any], words: str) -> None:
    for told, nbytes in run_ranks(3, compared, odd):
        assert words in told and len(nbytes) == 2


def test_a_fact_that_the_first_rank_has_not_is_no_difference() -> None:
    assert [numbers for numbers, _ in run_ranks(3, compared, {"more": 1})] == [[0.0, 1.0, 2.0]] * 3


def all_failed(group: Any) -> bool:
    with pytest.raises(DisagreementError, match="rank 4: broken"):
        agree(Gathers(group), {"error": "broken"}, (4, 5, 6))  # type: ignore[arg-type]
    return True


def test_ranks_that_fail_alike_fail() -> None:
    assert run_ranks(3, all_failed) == [True] * 3


def raised(group: Any, ranks: tuple[int, ...]) -> BaseException | None:
    """What a rank raises where the compressor of some ranks raised."""
    digest, link = Raised.by(KeyError("x")) if group.rank in ranks else "0123", Gathers(group)
    try:
        agree(link, {"plan": "1", KERNELS: [["Mine()", "4567"], ["Yours()", digest]]}, (4, 5, 6))
    except Exception as error:
        return error
    return None


def test_a_rank_whose_compressor_raised_raises_that_and_the_others_name_it() -> None:
    first, *failed = run_ranks(3, raised, (1, 2))
    words = (
        "all ranks stop, because some of them failed: rank 5: Yours() raised KeyError: 'x'; rank 6: Yours() raised KeyError: 'x'"
    )
    assert isinstance(first, DisagreementError) and str(first) == words and first.ranks == (5, 6)
    assert all(isinstance(error, KeyError) for error in failed)
    assert run_ranks(3, raised, (0, 1, 2)) == [None] * 3, "alike on all ranks: a step tells whether it matters"
