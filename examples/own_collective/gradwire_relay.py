"""A collective of one's own: payloads go around a ring of ranks, each rank passes on what the one before it sent.

Installed beside gradwire it is found by its entry point: `gw.Policy(default=spec, scheme="relay")`, "relay:inter" in a plan's
options, `gradwire options --collectives`. Every rank talks to its two neighbours only, and gets the bits of scheme="allgather".
"""

import torch

from gradwire.collectives import Copy, Decode, Encoding, Learn, OneEncode, Transfer, Transfers, Weigh, in_c
from gradwire.core.collectives import Collective
from gradwire.costs.collectives import flat_traffic
from gradwire.costs.steps import Step


class Relay(Transfers, OneEncode):
    """Encodes once on each rank, passes payloads on world_size - 1 times, then adds all of them in rank order."""

    def __init__(self, codec, piece, group, root):
        rank, size, flat = group.rank, group.world_size, piece.flat
        self.piece, self.rank, self.aliases = piece, rank, [flat]
        self.memory = [piece.memory(codec, 0, 0, flat.numel(), piece.whole)]
        nbytes = codec.payload_bytes(piece.whole, flat.dtype)
        *payloads, nothing = (flat.new_empty(n, dtype=torch.uint8) for n in (*[nbytes] * size, 0))
        hops = [Transfer([], [nothing] * size, [nothing] * size) for _ in range(max(1, size - 1))]
        for number, hop in enumerate(hops[: size - 1]):
            before, after = (rank - 1) % size, (rank + 1) % size
            hop.sent[after], hop.received[before] = payloads[rank - number], payloads[before - number]
            hop.arrivals[before] = []  # the next hop waits for it
        hops[0].before = [Encoding(codec, flat, *self.memory, piece.whole, piece.contexts[0], payloads[rank])]
        total = torch.empty_like(flat, dtype=piece.reduce_dtype)
        hops[-1].after = [
            Decode(codec, payload, piece.whole, flat.dtype, source > 0, total, piece.contexts[0])
            for source, payload in enumerate(payloads)
        ] + [Copy(flat, total)]
        if piece.energies is not None:  # the spec has weights of elements
            hops[0].before.insert(0, Weigh(piece.energies, piece.whole))
            hops[-1].after.append(Learn(piece.energies, flat, piece.whole))
        super().__init__([hops], rank, size)
        self.runs_in_c = in_c([codec], piece, self.memory)


def relay_steps(option, nodes, ranks_per_node, routing):
    """Return the costs of each task: those of the exchange are those of an all-gather around a ring."""
    traffic = flat_traffic("allgather", nodes, ranks_per_node, "ring")
    if option == RELAY.uncompressed:
        return (Step("relay:inter", share=1.0, parts=1, payload=0, traffic=traffic, gathers=False),)
    comp, relay, decomp = option
    return (
        Step(comp, share=1.0, parts=1, payload=0, traffic=None, gathers=False),
        Step(relay, share=1.0, parts=1, payload=1, traffic=traffic, gathers=False),
        Step(decomp, share=1.0, parts=nodes * ranks_per_node, payload=0, traffic=None, gathers=False),
    )


RELAY = Collective(
    name="relay",
    about="Every payload goes around a ring to every rank, and each adds them in rank order",
    tasks=("comp", "relay:inter", "decomp"),
    phases=("whole",),
    runs=Relay,
    steps=relay_steps,
    plain=True,
)
