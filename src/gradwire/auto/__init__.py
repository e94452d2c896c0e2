"""Decides what a handle runs: measures the live job, tries plans on it, keeps the fastest, and looks again when times change."""

from gradwire.auto.accuracy import check_schedules
from gradwire.auto.adaptive_bits import Bits
from gradwire.auto.correcting import CorrectionPeriods
from gradwire.auto.decision import AutoDecision
from gradwire.auto.driver import Auto
from gradwire.auto.tuning import Tuning

__all__ = [
    "Auto",
    "AutoDecision",
    "Bits",
    "CorrectionPeriods",
    "Tuning",
    "check_schedules",
]
