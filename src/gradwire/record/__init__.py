"""Records training runs from inside an ordinary training loop. A record is one document, `run.json`."""

from gradwire.record.run import Alternative, Decision, Interval, Rival, Run, TensorRecord

__all__ = ["Alternative", "Decision", "Interval", "Rival", "Run", "TensorRecord"]
