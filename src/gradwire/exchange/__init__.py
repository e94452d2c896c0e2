"""Averaging named tensors over ranks, by a plan: `gw.Exchange`. Knows no model."""

from gradwire.exchange.exchange import Exchange
from gradwire.exchange.lanes import Lanes
from gradwire.exchange.stats import BucketStats, ExchangeStats, Stats, StepReport
from gradwire.exchange.tensors import TensorMeta

__all__ = ["BucketStats", "Exchange", "ExchangeStats", "Lanes", "Stats", "StepReport", "TensorMeta"]
