"""The control exchange: what ranks tell each other at the end of a step."""

import torch.distributed as dist
from worlds import Given, Worlds

import gradwire as gw
import gradwire.transport.link as link


def step_with_a_changed_report(at_message: int) -> str:
    """Rank 0's message number `at_message` is changed on its way to rank 1; what a rank is told, within a few steps."""
    model = Given([300])
    handle = gw.parallelize(model, plan=gw.Uniform(gw.Identity()))
    send, sent = link.AllToAll.send, [0]

    def changed(self: link.AllToAll, parts: list) -> None:
        sent[0] += 1
        if sent[0] == at_message and dist.get_rank() == 0:
            parts = [part.clone() for part in parts]
            parts[1][33] ^= 4
        send(self, parts)

    link.AllToAll.send = changed
    try:
        for _ in range(3):
            model(model.random_gradients(1)).backward()
    except gw.CommunicationError as error:
        return str(error)
    finally:
        link.AllToAll.send = send
        handle.detach()
    return ""


def test_a_report_that_was_changed_on_the_way_is_no_report(worlds: Worlds) -> None:
    first, second = worlds.run(2, step_with_a_changed_report, 2)
    assert "bytes of the control exchange at the end of backward, after bucket 0" in second
    assert "changed on their way from rank 0 to rank 1: the checksum of what ranks tell each other does not fit" in second
    assert "step 2: rank 0 waited for" in first and "rank 1 says: step 1" in first
