"""Transport between ranks: links and the lanes that submit to them, wires, shared memory, heartbeats, agreement at the start."""

from gradwire.transport.addresses import own_address
from gradwire.transport.agreement import KERNELS, Raised, agree, all_have, broadcast_bytes, bytes_of, copy_from, gather_bytes
from gradwire.transport.devices import device_name, kind_of, standing_in
from gradwire.transport.exits import start_store_thread, waits_for_store
from gradwire.transport.flight import FlightRecord
from gradwire.transport.grid import Grid
from gradwire.transport.heartbeats import LONGEST_S, SHORTEST_S
from gradwire.transport.lanes import Lane, Lanes, LanesObserver
from gradwire.transport.link import AllToAll, Group, Link, SilentLink
from gradwire.transport.merging import MergedValues, gather_over_ranks, merge_over_ranks
from gradwire.transport.meter import Meter
from gradwire.transport.operations import Operations
from gradwire.transport.queued import COMPLETE, QueuedStep
from gradwire.transport.rendezvous import long_control
from gradwire.transport.rounds import merge_rounds, neighbours
from gradwire.transport.shared_lanes import TAGS
from gradwire.transport.slices import short_slices
from gradwire.transport.streams import Mark, Streams, streams_for
from gradwire.transport.tls import TlsOption, wanted_tls
from gradwire.transport.wire import DamagedError, LinkError, Wire, transfer

__all__ = [
    "COMPLETE", "KERNELS", "LONGEST_S", "SHORTEST_S", "TAGS", "AllToAll", "DamagedError", "FlightRecord", "Grid", "Group", "Lane",
    "Lanes", "LanesObserver", "Link", "LinkError", "Mark", "MergedValues", "Meter", "Operations", "QueuedStep", "Raised",
    "SilentLink", "Streams", "TlsOption", "Wire", "agree", "all_have", "broadcast_bytes", "bytes_of", "copy_from", "device_name",
    "gather_bytes", "gather_over_ranks", "kind_of", "long_control", "merge_over_ranks", "merge_rounds", "neighbours",
    "own_address", "short_slices", "standing_in", "start_store_thread", "streams_for", "transfer", "waits_for_store",
    "wanted_tls",
]  # fmt: skip
