"""Known traps of torch versions, for whoever trains with gloo. Each was met and measured on the versions it names."""

from typing import NamedTuple

from gradwire.doctor.report import Finding

__all__ = ["TRAPS", "Trap", "traps_of"]


class Trap(NamedTuple):
    """What goes wrong, and what to do. `first` and `last` are the (major, minor) versions where it was seen."""

    first: tuple[int, int]
    last: tuple[int, int]
    topic: str
    found: str
    cure: str


_ = (2, 13)

TRAPS = (
    Trap(
        _, _, "gloo: threads",
        "two threads that submit collectives to one group get silently wrong sums",
        "Submit from one thread a group, in the same order on all ranks. gradwire uses groups of its own.",
    ),
    Trap(
        _, _, "new_group",
        "disjoint sub-groups made with a bare new_group, each by its own ranks only, are silently cross-wired",
        "Make every group on all ranks in the same order, or pass use_local_synchronization=True on ranks that have made "
        "equally many groups before: it names a group by their number, and ranks whose numbers differ wait for each other.",
    ),
    Trap(
        _, _, "gloo: dtypes",
        "int16 and float8 tensors are refused",
        "Send them as uint8: tensor.view(torch.uint8).",
    ),
    Trap(
        _, _, "gloo: reduce_scatter",
        "reduce_scatter_tensor moves the bytes of an all_reduce and is slower than one",
        "Use all_to_all_single and a local sum.",
    ),
    Trap(
        _, _, "gloo: all_to_all",
        "all_to_all_single often runs in one direction at a time: up to twice the time on a slow link",
        "Post receives (irecv) before sends (isend); gradwire does.",
    ),
    Trap(
        _, _, "gloo: coalescing",
        "after a _coalescing_manager block that failed, collectives of that group silently do nothing",
        "Do not use it on gloo.",
    ),
    Trap(
        _, _, "gloo: order",
        "collectives do not finish in the order in which they were issued",
        "Wait for each async handle that you depend on, not for the last one.",
    ),
    Trap(
        _, _, "DDP hooks on gloo",
        "the 8-bit hooks crash, the bf16 hook refuses gloo, the PowerSGD hook is racy with more than one bucket",
        "The fp16 hook works; PowerSGD works if bucket_cap_mb holds the whole model.",
    ),
    Trap(
        _, _, "torch.compile",
        "a model compiled as a whole yields its first gradient when backward is nearly done: nothing overlaps",
        "Compile block by block: for block in model.blocks: block.compile().",
    ),
    Trap(
        _, _, "torchrun",
        "with --max-restarts the first restart can fail to connect",
        "Allow at least 3 restarts.",
    ),
)  # fmt: skip
del _


def traps_of(torch: str | None) -> list[Finding]:
    """The traps of a torch version such as 2.13.0+cpu, each a note."""
    words = (torch or "").split(".")
    if len(words) < 2 or not (words[0].isdigit() and words[1].isdigit()):
        return []
    version = int(words[0]), int(words[1])
    known = [trap for trap in TRAPS if trap.first <= version <= trap.last]
    if known:
        return [Finding(topic=trap.topic, severity="note", found=trap.found, cure=trap.cure) for trap in known]
    lowest, highest = min(trap.first for trap in TRAPS), max(trap.last for trap in TRAPS)
    seen = ".".join(map(str, lowest)) + (f" to {'.'.join(map(str, highest))}" if highest != lowest else "")
    return [
        Finding(
            topic="unknown",
            severity="note",
            found=f"torch {torch} was not examined; known are the traps of {seen}",
            cure="Run the tests of gradwire with it before a long job.",
        )
    ]
