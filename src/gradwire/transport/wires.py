"""Makes the wires of all lanes, where every rank can run phases in C++ (else Python carries gradients as well)."""

import logging
from functools import partial

from gradwire.transport.grid import Grid
from gradwire.transport.link import Group, Link
from gradwire.transport.sharing import share_memory_of_machines
from gradwire.transport.wire import Wire

log = logging.getLogger(__name__)


def meshes_of(lanes: int) -> list[str]:
    """The names of the meshes for so many wires."""
    return [f"wire {number}" for number in range(lanes)]


def make_wires(control: Link, group: Group, lanes: int) -> list[Wire]:
    """One wire for each lane; none where a rank cannot, which rank 0 says. Ranks of a machine share memory. Collective, on the
    control lane."""
    if lanes and (problem := group.met.why_no_wires()):
        if group.rank == 0:
            log.warning("Python exchanges gradients, which takes longer, since not all ranks can do it in C++: %s", problem)
        return []
    timeout_s = control.timeout.total_seconds()
    meeting, made = group.met, list[Wire]()
    for name in meshes_of(lanes):
        made.append(Wire(group.world_size, meeting.mesh(name), timeout_s, partial(meeting.reach, name)))
    share_memory_of_machines(control, Grid.of(meeting.machines, group.rank), made)
    return made
