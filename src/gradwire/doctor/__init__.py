"""`gradwire doctor`: what this machine and this job can do, what is in the way, and the cure.

`facts` gathers, `machine`, `ranks` and `traps` judge (pure functions from facts to findings), `meeting`, `survey` and `links`
let the ranks of a job meet and measure, `examine` is the order of it all, `table` shows the report.
"""

from gradwire.doctor.examine import examine
from gradwire.doctor.report import Finding, Report
from gradwire.doctor.table import summary, tables

__all__ = ["Finding", "Report", "examine", "summary", "tables"]
