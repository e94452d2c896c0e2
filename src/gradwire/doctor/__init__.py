"""`gradwire doctor`: the abilities of this machine and this job, their problems, and the cures.

`facts` gathers, `machine`, `ranks` and `traps` judge (pure functions from facts to findings), `meeting`, `survey` and `links`
let the ranks of a job meet and measure, `examine` calls them in order, `table` shows the report.
"""

from gradwire.doctor.examine import examine
from gradwire.doctor.report import Finding, Report
from gradwire.doctor.table import summary, tables

__all__ = ["Finding", "Report", "examine", "summary", "tables"]
