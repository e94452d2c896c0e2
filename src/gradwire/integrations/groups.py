"""The process group on which gradwire exchanges what a framework averages on its own."""

from torch.distributed import ProcessGroup, get_process_group_ranks

from gradwire.errors import PlanError

__all__ = ["group_for"]


def group_for(process_group: ProcessGroup | None, own: ProcessGroup, framework: str) -> ProcessGroup:
    """The script's group for gradwire, or the framework's own if the script gave none. Raises PlanError unless both have the same
    ranks in the same order."""
    if process_group is None:
        return own
    expected = get_process_group_ranks(own)
    ranks = [] if isinstance(process_group, int) else get_process_group_ranks(process_group)  # an int: this rank is not in it
    if ranks != expected:
        raise PlanError(
            f"process_group has the ranks {ranks}, and {framework} averages between {expected}. Pass a group of these ranks, in "
            "this order, or leave it out."
        )
    return process_group
