"""Records of training runs: made inside an ordinary training loop, written as one document, `run.json`."""

from gradwire.record.run import Alternative, Decision, Interval, Rival, Run, TensorRecord

__all__ = [
    "Alternative",
    "Decision",
    "Interval",
    "Rival",
    "Run",
    "TensorRecord",
]
