"""Requests for methods of the bench that only the repository has. No torch."""

from dataclasses import dataclass

from benchmarks.campaigns.parts import WRONG_PREFIX, check_part
from benchmarks.campaigns.rivals import ISLANDS_PREFIX, RIVAL_PREFIX, check_rival, every_of
from gradwire.bench.runner import BenchRequest

__all__ = ["RepositoryRequest"]


@dataclass(frozen=True)
class RepositoryRequest(BenchRequest):
    """A request with methods `wrong-on-purpose:PART:POLICY` (`left_out`), `rival:NAME` (`rivals`) and `islands@30` too."""

    worker: str = "benchmarks.campaigns.worker"

    def check_method(self, name: str) -> None:
        """Raise `FormatError` or `SpecError` if the worker cannot build a method of this name."""
        if name.startswith(WRONG_PREFIX):
            check_part(name)
        elif name.startswith(RIVAL_PREFIX):
            check_rival(name)
        elif name.startswith(ISLANDS_PREFIX):
            every_of(name)
        else:
            super().check_method(name)
