"""Finds differences between ranks that should be alike."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from gradwire.core import SWITCH_WORDS
from gradwire.doctor.facts import SITE, TLS, Facts
from gradwire.doctor.report import Finding, Severity


def rank_list(ranks: Iterable[int]) -> str:
    """Write a list of ranks in words, with ranges for three consecutive ranks or more.

    >>> rank_list([3]), rank_list([0, 1, 2, 5])
    ('rank 3', 'ranks 0 to 2, 5')
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"rank{'s' * (sum(map(len, runs)) != 1)} {', '.join(words)}"


def _variable(name: str) -> Callable[[Facts], object]:
    return lambda facts: facts.variables.get(name, "(not set)")


def _site(facts: Facts) -> str:
    return "set" if facts.variables.get(SITE, "").strip() else "(not set)"


def _encryption(facts: Facts) -> str:
    """Return the kind of encryption that the environment asks for. Paths of certificates may differ between machines."""
    words = facts.variables.get(TLS, "")
    if words.count(":") == 2 or (not words and facts.variables.get("GLOO_DEVICE_TRANSPORT") == "TCP_TLS"):
        return "by certificates"
    on = SWITCH_WORDS.get(words or "off")
    return words if on is None else "by the job's key" if on else "no encryption"


_COMPARED: tuple[tuple[str, Callable[[Facts], object], Severity, str, str], ...] = (
    ("gradwire", lambda f: f.gradwire, "problem",
     "parallelize refuses to run, because versions may encode payloads differently.", "Install the same version everywhere."),
    ("torch", lambda f: f.torch, "problem",
     "Ranks with different torch versions drift apart, and their backends may be incompatible.",
     "Install the same version everywhere."),
    ("Python", lambda f: f.python, "note",
     "Pickled objects, such as those of all_gather_object, may not be readable everywhere.",
     "Use the same Python everywhere."),
    ("WORLD_SIZE", _variable("WORLD_SIZE"), "problem",
     "The ranks wait for different numbers of others.", "Start every rank with the same WORLD_SIZE."),
    (SITE, _site, "problem", "parallelize refuses to run, because nobody knows which machines are near each other.",
     "Export GRADWIRE_SITE on all machines, or on none."),
    (TLS, _encryption, "problem", "parallelize refuses to run, unless the script passes the same tls= on all ranks.",
     "Export the same GRADWIRE_TLS on all machines."),
    ("C++ kernels", lambda f: f.kernel_level or "plain torch", "note",
     "All levels give the same bytes, but the slowest rank limits the speed.", ""),
    ("ranks a node", lambda f: f.local_world_size, "note",
     "Ranks on the node with more ranks get less bandwidth.", ""),
    ("threads", lambda f: f.threads, "note", "Every step takes as long as that of the slowest rank.",
     "Set the same OMP_NUM_THREADS everywhere, if the machines are equal."),
    ("GPUs", lambda f: ", ".join(f.cuda_devices) or "none", "note",
     "Every step takes as long as that of the slowest rank.", ""),
    ("NCCL", lambda f: f.nccl or "none", "problem",
     "NCCL groups need the same version on all ranks.", "Install the same torch wheel everywhere."),
)  # fmt: skip
"""The compared facts: name, value, severity of a difference, why it matters, and the cure."""


def differences(present: Mapping[int, Facts]) -> Iterator[Finding]:
    """Yield a finding for each fact that differs between ranks, with the ranks of each value."""
    names = {name for facts in present.values() for name in facts.variables if name.startswith(("NCCL_", "TORCH_"))}
    names -= {"NCCL_SOCKET_IFNAME"}  # interfaces have other names on other machines
    words: tuple[Severity, str, str] = "note", "The backends are set differently.", "Export it alike on all nodes."
    for what, value_of, severity, why, cure in (*_COMPARED, *((name, _variable(name), *words) for name in sorted(names))):
        values: dict[str, list[int]] = {}
        for rank, facts in sorted(present.items()):
            values.setdefault(str(value_of(facts)), []).append(rank)
        if len(values) > 1:
            found = "; ".join(f"{value} on {rank_list(ranks)}" for value, ranks in values.items())
            yield Finding(severity, "differences", f"{what}: {found}", why, cure)
