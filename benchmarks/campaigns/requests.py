"""Requests for methods of the bench that only the repository has. No torch."""

from dataclasses import dataclass

from benchmarks.campaigns.parts import WRONG_PREFIX, check_part
from benchmarks.campaigns.rivals import RIVAL_PREFIX, check_rival
from gradwire.bench.runner import BenchRequest

__all__ = ["RepositoryRequest"]


@dataclass(frozen=True)
class RepositoryRequest(BenchRequest):
    """A request whose methods may be `wrong-on-purpose:PART:POLICY` (`left_out`) and `rival:NAME` (`rivals`) too."""

    worker: str = "benchmarks.campaigns.worker"

    def check_method(self, name: str) -> None:
        """Raise `FormatError` or `SpecError` if the worker cannot build a method of this name."""
        if name.startswith(WRONG_PREFIX):
            check_part(name)
        elif name.startswith(RIVAL_PREFIX):
            check_rival(name)
        else:
            super().check_method(name)
