"""Names of the bench's methods that other libraries have, and of `gw.islands`. No torch, and none of these libraries.

They are no dependencies of gradwire, so that each says how to get it.
"""

from importlib.util import find_spec

from gradwire.errors import FormatError

__all__ = [
    "HIVEMIND", "ISLANDS_PREFIX", "OUTER", "RIVAL_PREFIX", "TORCHFT", "TORCHFT_MEAN", "absent", "check_rival", "every_of",
    "outer_of",
]  # fmt: skip

RIVAL_PREFIX = "rival:"
"""The prefix of methods of other libraries."""
ISLANDS_PREFIX = "islands@"
"""islands@30: two islands that exchange every 30 steps."""
TORCHFT, TORCHFT_MEAN = "torchft-diloco", "torchft-diloco-mean"
"""torchft's DiLoCo, float32 on gloo: rival:torchft-diloco@30 exchanges every 30 steps. The second one has an outer optimizer that
makes the global weights the mean of the local ones."""
HIVEMIND = "hivemind-mean"
"""Hivemind's mean of weights, in float16: rival:hivemind-mean@30 exchanges every 30 steps."""
OUTER = {TORCHFT: (0.7, 0.9), TORCHFT_MEAN: (1.0, 0.0)}
"""Rate and momentum of the outer optimizer; the first are those of `gw.LocalSteps.diloco`."""

_GET = {
    "torchft": (
        "`python -m pip install --target /tmp/torchft --no-deps torchft==0.2.0` and `python -m pip install --target /tmp/torchft "
        "'opentelemetry-exporter-otlp-proto-http>=1.39' 'opentelemetry-sdk>=1.39'`"
    ),
    "hivemind": (
        "`python -m pip install --target /tmp/hivemind --no-deps hivemind==1.1.12`, and in the same way all that its metadata "
        "names, without torch"
    ),
}
"""How to get each library without another torch."""


def outer_of(name: str) -> tuple[int, float, float]:
    """The steps from one exchange to the next, and rate and momentum of the outer optimizer. Raises FormatError for the name of
    no rival.

    >>> outer_of("rival:torchft-diloco@30")
    (30, 0.7, 0.9)
    """
    if (library := _library(name)) not in OUTER:
        raise FormatError(f"there is no method {name[:300]!r}. Write {RIVAL_PREFIX}{TORCHFT}@30 to exchange every 30 steps.")
    return every_of(name), *OUTER[library]


def every_of(name: str) -> int:
    """The steps from one exchange to the next. Raises FormatError for a name without them.

    >>> every_of("islands@30")
    30
    """
    kind, _, every = name.partition("@")
    if not (every.isascii() and every.isdigit() and int(every) > 0):
        raise FormatError(f"there is no method {name[:300]!r}. Write {kind[:300]}@30 to exchange every 30 steps.")
    return int(every)


def absent(name: str) -> str:
    """Why the rival of this name cannot be measured here, and how to get its library; '' if it can."""
    library = "hivemind" if _library(name) == HIVEMIND else "torchft"
    if find_spec(library) is not None:
        return ""
    how = f"{_GET[library]}; then run this with PYTHONPATH=/tmp/{library}."
    return f"{library} is not installed. Put it beside this environment: {how}"


def check_rival(name: str) -> None:
    """Raise FormatError for the name of a rival that is unknown, or whose library is absent."""
    if _library(name) != HIVEMIND:
        outer_of(name)
    every_of(name)
    if why := absent(name):
        raise FormatError(f"{name} cannot run: {why}")


def _library(name: str) -> str:
    return name.removeprefix(RIVAL_PREFIX).partition("@")[0]
