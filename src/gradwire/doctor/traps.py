"""Known traps of torch versions, for whoever trains with gloo. Each was met and measured on the version below."""

from gradwire.doctor.report import Finding, note

_SEEN = "2.13"

TRAPS = (
    note(
        "gloo: threads",
        "two threads that submit collectives to one group get silently wrong sums",
        cure="Submit from one thread a group, in the same order on all ranks. gradwire uses groups of its own.",
    ),
    note(
        "new_group",
        "disjoint sub-groups made with a bare new_group, each by its own ranks only, are silently cross-wired",
        cure="Make every group on all ranks in the same order, or pass use_local_synchronization=True on ranks that have made "
        "equally many groups before: it names a group by their number, and ranks whose numbers differ wait for each other.",
    ),
    note(
        "gloo: dtypes",
        "int16 and float8 tensors are refused",
        cure="Send them as uint8: tensor.view(torch.uint8).",
    ),
    note(
        "gloo: reduce_scatter",
        "reduce_scatter_tensor moves the bytes of an all_reduce and is slower than one",
        cure="Use all_to_all_single and a local sum.",
    ),
    note(
        "gloo: all_to_all",
        "all_to_all_single often runs in one direction at a time: up to twice the time on a slow link",
        cure="Post receives (irecv) before sends (isend); gradwire does.",
    ),
    note(
        "gloo: coalescing",
        "after a _coalescing_manager block that failed, collectives of that group silently do nothing",
        cure="Do not use it on gloo.",
    ),
    note(
        "gloo: order",
        "collectives do not finish in the order in which they were issued",
        cure="Wait for each async handle that you depend on, not for the last one.",
    ),
    note(
        "DDP hooks on gloo",
        "the 8-bit hooks crash, the bf16 hook refuses gloo, the PowerSGD hook is racy with more than one bucket",
        cure="The fp16 hook works; PowerSGD works if bucket_cap_mb holds the whole model.",
    ),
    note(
        "torch.compile",
        "a model compiled as a whole yields its first gradient when backward is nearly done: nothing overlaps",
        cure="Compile block by block: for block in model.blocks: block.compile().",
    ),
    note(
        "torchrun",
        "with --max-restarts the first restart can fail to connect",
        cure="Allow at least 3 restarts.",
    ),
)  # fmt: skip


def traps_of(torch: str | None) -> list[Finding]:
    """The traps of a torch version such as 2.13.0+cpu, each a note."""
    version = (torch or "").split(".")[:2]
    if len(version) < 2 or not all(map(str.isdigit, version)):
        return []
    if version == _SEEN.split("."):
        return list(TRAPS)
    found = f"torch {torch} was not examined; known are the traps of {_SEEN}"
    return [note("unknown", found, cure="Run the tests of gradwire with it before a long job.")]
