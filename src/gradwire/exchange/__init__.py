"""Averaging named tensors over ranks, by a plan: `gw.Exchange`. Knows no model."""

from gradwire.exchange.exchange import Abandoned, Exchange, Lent, TaskTimes
from gradwire.exchange.golden import golden_digests
from gradwire.exchange.host_codec import codec_on
from gradwire.exchange.layout import BucketBuffers, Slot
from gradwire.exchange.options import check_sharded
from gradwire.exchange.plans import embeddings_of, info_of, looks_up_rows, plan_for, warn_of_embeddings
from gradwire.exchange.residual_store import SHARED, Remembered, State, added_up, followed, is_alike
from gradwire.exchange.states import (
    CORRECTION,
    LOCAL,
    MEASURED,
    OUTER,
    Saved,
    by_tensor,
    divided,
    packed_samples,
    read_state,
    split,
    warn_of_lost,
    write_state,
)
from gradwire.exchange.stats import BucketStats, DeviceTimes, ExchangeStats, Stats, StepReport
from gradwire.exchange.tensors import TensorMeta, outside_modes

__all__ = [
    "CORRECTION", "LOCAL", "MEASURED", "OUTER", "SHARED", "Abandoned", "BucketBuffers", "BucketStats", "DeviceTimes", "Exchange",
    "ExchangeStats", "Lent", "Remembered", "Saved", "Slot", "State", "Stats", "StepReport", "TaskTimes", "TensorMeta", "added_up",
    "by_tensor", "check_sharded", "codec_on", "divided", "embeddings_of", "followed", "golden_digests", "info_of", "is_alike",
    "looks_up_rows", "outside_modes", "packed_samples", "plan_for", "read_state", "split", "warn_of_embeddings",
    "warn_of_lost", "write_state",
]  # fmt: skip
