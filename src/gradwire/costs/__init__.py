"""Costs of collectives and codecs: alpha-beta models, codec times, fits that keep their residuals. Pure: no torch."""

from gradwire.costs.collectives import ROUTINGS, us_per_byte
from gradwire.costs.fit import Fit, fit_line, fit_link, fit_points
from gradwire.costs.imported import import_file
from gradwire.costs.nccl_tests import cluster_from
from gradwire.costs.prices import DECODE_CALLS, AffineCost, Bytes, CurveCost, Price, PricedBucket, Prices, bytes_of, fold, time_at
from gradwire.costs.steps import Step

__all__ = [
    "DECODE_CALLS", "ROUTINGS", "AffineCost", "Bytes", "CurveCost", "Fit", "Price", "PricedBucket", "Prices",
    "Step", "bytes_of", "cluster_from", "fit_line", "fit_link", "fit_points", "fold", "import_file", "time_at", "us_per_byte",
]  # fmt: skip
