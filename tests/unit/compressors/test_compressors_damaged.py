"""A flip of any bit in a payload of any spec is noticed by the rank that receives it, before it decodes."""

import random
import socket

import pytest
import torch
from test_laws import FEEDBACK, SPECS, codec_of

from gradwire.core import PowerSGD, Spec
from gradwire.kernels import cpu
from gradwire.kernels.checksum import crc32c
from gradwire.transport import DamagedError, Meter
from gradwire.transport.operations import Operations
from gradwire.transport.wire import Wire

SENT = [spec for spec in dict.fromkeys([*SPECS, *FEEDBACK]) if not isinstance(spec, PowerSGD)]
"""Gloo sums PowerSGD's factors itself."""
HEADER_BYTES = 16


def payload_of(spec: Spec, numel: int) -> torch.Tensor:
    codec = codec_of(spec, (numel,))
    return codec.encode(torch.randn(numel, generator=torch.Generator().manual_seed(numel))).clone()


def list_of(payload: torch.Tensor, sends: bool) -> Operations:
    operations = Operations()
    (operations.send if sends else operations.receive)(1, payload, 7)
    operations.flush()
    return operations


def flips_that_are_missed(spec: Spec, flips: int) -> int:
    """Messages with one changed bit that a wire takes."""
    payload = payload_of(spec, 777)
    near, far = socket.socketpair()
    sender = Wire(2, {1: near}, 10.0)
    sender.run(list_of(payload, True), Meter())
    frame = far.recv(2**20)
    assert frame[HEADER_BYTES:] == bytes(payload.tolist())
    arrived = torch.zeros_like(payload)
    receives, missed = list_of(arrived, False), 0
    receiver = Wire(2, {1: near}, 10.0)
    for bit in (None, *random.Random(0).choices(range(8 * payload.numel()), k=flips)):
        changed = bytearray(frame)
        if bit is not None:
            changed[HEADER_BYTES + bit // 8] ^= 1 << bit % 8
        far.sendall(changed)
        try:
            receiver.run(receives, Meter())
            missed += bit is not None
            assert torch.equal(arrived, payload) or bit is not None
        except DamagedError as error:
            assert bit is not None and error.peer == 1
    near.close()
    far.close()
    return missed


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")
@pytest.mark.parametrize("spec", SENT, ids=repr)
def test_a_wire_notices_flips(spec: Spec) -> None:
    assert flips_that_are_missed(spec, 20) == 0


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")
def test_a_wire_notices_100_000_flips() -> None:
    assert sum(flips_that_are_missed(spec, -(-100_000 // len(SENT))) for spec in SENT) == 0


@pytest.mark.parametrize("spec", SENT, ids=repr)
def test_the_checksum_that_travels_through_gloo_notices_flips(spec: Spec) -> None:
    payload = payload_of(spec, 777)
    sent = crc32c(payload)
    for bit in random.Random(1).choices(range(8 * payload.numel()), k=20):
        changed = payload.clone()
        changed[bit // 8] ^= 1 << bit % 8
        assert crc32c(changed) != sent
