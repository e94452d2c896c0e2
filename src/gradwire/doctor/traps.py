"""Known traps of torch with gloo. Each trap was measured on the torch version below."""

from gradwire.doctor.report import Finding, note

_SEEN = "2.13"

_FOUND = {
    "gloo: threads": "two threads that submit collectives to one group get silently wrong sums",
    "new_group": "disjoint groups, each made by its own ranks only, are silently cross-wired",
    "gloo: dtypes": "int16 and float8 tensors are refused",
    "gloo: reduce_scatter": "reduce_scatter_tensor moves the bytes of an all_reduce and is slower than an all_reduce",
    "gloo: all_to_all": "all_to_all_single often runs in one direction at a time: up to twice the time on a slow link",
    "gloo: coalescing": "after a failed _coalescing_manager block, collectives of the group silently do nothing",
    "gloo: order": "collectives do not finish in the order in which they were issued",
    "DDP hooks on gloo": "the 8-bit hooks crash, the bf16 hook refuses gloo, PowerSGD has a race with several buckets",
    "torch.compile": "a model compiled as a whole gives all gradients near the end of backward: nothing overlaps",
    "torchrun": "with --max-restarts the first restart can fail to connect",
}
_CURES = {
    "gloo: threads": "Submit from one thread per group, in the same order on all ranks. gradwire uses its own groups.",
    "new_group": "Make every group on all ranks in the same order. With use_local_synchronization=True, all ranks of the group "
    "must have made equally many groups before.",
    "gloo: dtypes": "Send the tensors as uint8: tensor.view(torch.uint8).",
    "gloo: reduce_scatter": "Use all_to_all_single and a local sum.",
    "gloo: all_to_all": "Post receives (irecv) before sends (isend), as gradwire does.",
    "gloo: coalescing": "Do not use _coalescing_manager on gloo.",
    "gloo: order": "Wait for each async handle that you depend on, not only for the last one.",
    "DDP hooks on gloo": "Use the fp16 hook, or PowerSGD with a bucket_cap_mb that holds the whole model.",
    "torch.compile": "Compile block by block: for block in model.blocks: block.compile().",
    "torchrun": "Allow at least 3 restarts.",
}
TRAPS = tuple(note(topic, found, cure=_CURES[topic]) for topic, found in _FOUND.items())


def traps_of(torch: str | None) -> list[Finding]:
    """The traps of a torch version such as 2.13.0+cpu."""
    version = (torch or "").split(".")[:2]
    if len(version) < 2 or not all(map(str.isdigit, version)):
        return []
    if version == _SEEN.split("."):
        return list(TRAPS)
    found = f"torch {torch} was not examined; the known traps are those of {_SEEN}"
    return [note("unknown", found, cure="Run gradwire's tests with this torch before a long job.")]
