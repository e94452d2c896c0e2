"""The process of one section: `python -m benchmarks.gpu.section JOB`."""

import importlib
import sys

from benchmarks.gpu.findings import Job, die_with_parent, end_by


def main() -> None:
    """Run the section that the job names."""
    die_with_parent()
    job = Job.from_json(sys.argv[1])
    end_by(job.until)
    importlib.import_module(f"benchmarks.gpu.{job.section}").run(job)


if __name__ == "__main__":
    main()
