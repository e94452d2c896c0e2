"""Transfers that cannot be run are refused when they are made."""

import pytest
import torch

from gradwire.collectives import Transfer, Transfers

NOTHING, PART = torch.empty(0, dtype=torch.uint8), torch.empty(5, dtype=torch.uint8)


def test_a_part_that_nobody_waits_for_is_refused() -> None:
    received = [PART, PART, NOTHING, PART]
    with pytest.raises(ValueError, match=r"rank 1 has a buffer for rank 3 and no arrivals\[3\].*or to \[\]"):
        Transfers([[Transfer([], [NOTHING] * 4, received, {0: []})]], 1, 4)


def test_neither_the_own_part_nor_an_empty_one_is_waited_for() -> None:
    whole = Transfer([], [PART] * 3, [PART, PART, NOTHING], {0: []})
    made = Transfers([[Transfer.empty([], 3, NOTHING)], [whole]], 1, 3)
    assert made.exchanges == 2 and made.bytes_to == [5, 0, 5]
