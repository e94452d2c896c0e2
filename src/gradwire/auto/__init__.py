"""Drivers that choose a handle's plan: they measure the job, try plans, keep the fastest, and decide again after a change."""

from gradwire.auto.accuracy import EARLIER_SPECS, all_specs, is_auto
from gradwire.auto.adaptive_bits import AdaptiveBitsDriver
from gradwire.auto.alone import ChosenSpecs, choose_alone, counted
from gradwire.auto.correcting import CorrectionPeriods
from gradwire.auto.decision import AutoDecision, say
from gradwire.auto.driver import Auto
from gradwire.auto.live import AllRanks
from gradwire.auto.tuning import Tuning

__all__ = [
    "EARLIER_SPECS", "AdaptiveBitsDriver", "AllRanks", "Auto", "AutoDecision", "ChosenSpecs", "CorrectionPeriods", "Tuning",
    "all_specs", "choose_alone", "counted", "is_auto", "say",
]  # fmt: skip
