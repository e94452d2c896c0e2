"""The shapes of grids, for any number of ranks."""

from math import sqrt

from gradwire.core import columns_of, peers_of, rows_of


def test_rows_hold_all_ranks_and_leave_each_few_peers() -> None:
    for ranks in range(1, 1100):
        rows = rows_of(ranks)
        *whole, last = rows
        assert sum(rows) == ranks and set(whole) <= {rows[0]} and 1 <= last <= rows[0]
        assert peers_of(rows) <= max(10, 4 * sqrt(ranks))
        if last < rows[0]:
            assert len(whole) >= 2, "a part of the short row has no more than one edge inside a column"
            assert 2 * peers_of(rows) <= peers_of((columns_of(ranks),) * (ranks // columns_of(ranks)))
        else:
            assert rows[0] == columns_of(ranks)


def test_saved_plans_of_numbers_with_an_even_grid_keep_their_shape() -> None:
    assert [rows_of(ranks) for ranks in (6, 18, 22, 64, 1024)] == [(3,) * 2, (6,) * 3, (11,) * 2, (8,) * 8, (32,) * 32]
