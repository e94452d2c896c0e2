"""What collectives and codecs cost: alpha-beta models, codec times, fits that keep their residuals. Pure: no torch."""

from gradwire.costs.codecs import CodecTimes
from gradwire.costs.fit import Fit, fit_line, fit_link, fit_points
from gradwire.costs.fold import AffineCost, fold
from gradwire.costs.prices import Price, PricedBucket, Prices

__all__ = [
    "AffineCost",
    "CodecTimes",
    "Fit",
    "Price",
    "PricedBucket",
    "Prices",
    "fit_line",
    "fit_link",
    "fit_points",
    "fold",
]
