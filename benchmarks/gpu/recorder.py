"""A plugin of pytest that writes the outcome of each test as the test ends, so that a killed run still says how many passed."""

import pytest

from benchmarks.gpu.findings import FAILED, MEASURED, MESSAGE, PASSED, SKIPPED, Job, die_with_parent


class Recorder:
    """Writes findings of the section's job."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        if report.failed:
            self.job.write(report.nodeid, FAILED, when=report.when, error=report.longreprtext[-MESSAGE:])
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.job.write(report.nodeid, SKIPPED, why=reason)
        else:
            self.job.write(report.nodeid, PASSED, s=round(report.duration, 2))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.job.write(report.nodeid, FAILED, when="collect", error=report.longreprtext[-MESSAGE:])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-job", help="the job of the section `marked`, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Write outcomes in the process that gets the reports of all workers."""
    die_with_parent()
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Recorder(Job.from_json(config.getoption("--gpu-job"))))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write the number of tests, once."""
    worker = getattr(session.config, "workerinput", {}).get("workerid")
    if session.items and worker in (None, "gw0"):
        Job.from_json(session.config.getoption("--gpu-job")).write("tests to run", MEASURED, count=len(session.items))
