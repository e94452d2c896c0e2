"""The checksum of messages is CRC32C: by the processor's instruction, by a table, and in plain torch."""

import pytest
import torch

from gradwire.kernels import checksum, cpu
from gradwire.kernels.reference.checksum import crc32c as reference

SIZES = [0, 1, 3, 4, 5, 7, 8, 9, 63, 123, 2047, 2048, 4097, 6143, 6144, 6145, 12288 + 5, 100_003]


def test_the_check_value_of_the_standard() -> None:
    digits = torch.frombuffer(bytearray(b"123456789"), dtype=torch.uint8)
    assert reference(digits) == checksum.crc32c(digits) == 0xE3069283
    assert reference(torch.zeros(32, dtype=torch.uint8)) == 0x8A9136AA


@pytest.mark.skipif(cpu.available() is not None, reason="needs the C++ kernels")
@pytest.mark.parametrize("offset", [0, 1, 5])
@pytest.mark.parametrize("size", SIZES)
def test_all_three_agree(size: int, offset: int) -> None:
    memory = torch.randint(0, 256, (size + offset,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    values = memory[offset:]
    by_table = checksum._native()(values.data_ptr(), values.nbytes, True)
    assert checksum.crc32c(values) == by_table == reference(values)


def test_ranks_without_the_library_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1001)
    with_library = checksum.crc32c(values)
    monkeypatch.setattr(checksum, "available", lambda: "was not built")
    assert checksum.crc32c(values) == with_library
