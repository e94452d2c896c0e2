"""What `print(handle.stats())` shows."""

from gradwire.core.memory_report import MemoryRecord
from gradwire.exchange import BucketStats, ExchangeStats, Stats

BUCKET = BucketStats(("weight",), 250_000, 1, 1_000_000, 130_000, 0, 130_000)
USUAL = {
    "steps": 7,
    "wire_bytes": 130_000,
    "intra_bytes": 0,
    "inter_bytes": 130_000,
    "gradient_bytes": 1_000_000,
    "codec_us": 250.0,
    "memory": MemoryRecord(gradient_bytes=0, residual_bytes=0, payload_bytes=0),
    "buckets": (BUCKET,),
}
LINE = "7 steps in 1 bucket; this rank sends 0.130 MB a step for tensors of 1.000 MB; encoding and decoding take 0.25 ms"


def test_statistics_are_one_line() -> None:
    assert str(ExchangeStats(**USUAL)) == LINE
    assert str(Stats(**USUAL, exposed_us=1500.0, before_first_gradient=0.1)) == (f"{LINE}; the end of backward waits 1.50 ms")


def test_their_repr_has_every_field() -> None:
    shown = repr(Stats(**USUAL | {"buckets": (BUCKET, BUCKET)}, exposed_us=1500.0, before_first_gradient=0.1))
    assert "wire_bytes=130000" in shown and "before_first_gradient=0.1" in shown
    assert "2 buckets" in str(ExchangeStats(**USUAL | {"buckets": (BUCKET, BUCKET)}))
