"""Implements `gradwire doctor`: finds the abilities of this machine and this job, their problems, and the cures.

`facts` gathers, `machine` and `ranks` judge (pure functions from facts to findings), `meeting` and `links`
let the ranks of a job meet and measure, `examine` calls them in order, `report` shows the findings.
"""

from gradwire.doctor.examine import examine
from gradwire.doctor.report import Finding, Report, summary, tables

__all__ = ["Finding", "Report", "examine", "summary", "tables"]
