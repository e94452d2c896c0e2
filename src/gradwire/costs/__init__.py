"""What collectives and codecs cost: alpha-beta models, codec times, fits that keep their residuals. Pure: no torch."""

from gradwire.costs.fit import Fit, fit_line, fit_link, fit_points
from gradwire.costs.prices import AffineCost, CodecTimes, Price, PricedBucket, Prices, fold

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
