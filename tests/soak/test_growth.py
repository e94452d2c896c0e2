"""A short run of `python -m soak.growth`."""

import pytest

from soak.growth import JOBS, MOST_BYTES_OF_SHORT_RUNS, Looks, grown

IN_CI = ("handles", "fsdp2")
NEEDS = {"accelerate": "accelerate", "lightning": "lightning"}


@pytest.mark.slow
@pytest.mark.parametrize("job", [pytest.param(job, marks=[] if job in IN_CI else pytest.mark.thorough) for job in JOBS])
def test_nothing_grows(job: str) -> None:
    if job in NEEDS:
        pytest.importorskip(NEEDS[job], reason=f"gradwire's extra {job} is not installed")
    (row,) = grown([job], 500)
    assert row["passed"], row


def test_growth_is_seen() -> None:
    looks, kept = Looks(40), []
    for _ in range(40):
        kept.append(bytearray(2**20))
        looks()
    assert looks.growth()[0] > 5 * 2**20
    assert MOST_BYTES_OF_SHORT_RUNS < 5 * 2**20
