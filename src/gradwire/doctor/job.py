"""What a launcher told this process: its rank, how many there are, and where they meet."""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Job"]

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Job:
    """The variables that torchrun, or whoever starts the ranks, sets for each."""

    rank: int
    world_size: int
    address: str
    port: int
    store_is_launchers: bool
    """torchrun hosts the store itself; otherwise rank 0 does."""
    attempt: str

    @staticmethod
    def of(environ: Mapping[str, str]) -> "Job | None":
        """The job of this process, None outside of one. Raises ValueError where the variables cannot be meant."""
        present = [name for name in _NEEDED if environ.get(name)]
        if not {"RANK", "WORLD_SIZE"} & set(present):
            return None
        missing = [name for name in _NEEDED if name not in present]
        if missing:
            raise ValueError(f"{', '.join(present)} set, but not {', '.join(missing)}")
        rank, world_size, port = (_number(environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
        if not 0 <= rank < world_size:
            raise ValueError(f"RANK is {rank}, but WORLD_SIZE is {world_size}: ranks count from 0")
        if not 0 < port < 2**16:
            raise ValueError(f"MASTER_PORT is {port}, which is no port")
        launchers = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return Job(rank, world_size, environ["MASTER_ADDR"], port, launchers, attempt)

    @property
    def place(self) -> str:
        return f"{self.address}:{self.port}"


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isdecimal():
        raise ValueError(f"{name} is {text!r}, which is no number")
    return int(text)
