"""The predicted timeline of a recorded run, from the profile in the same folder."""

from pathlib import Path
from typing import NamedTuple

from gradwire.core.cluster import Cluster
from gradwire.core.costs import Costs
from gradwire.core.profile import Profile
from gradwire.errors import GradwireError
from gradwire.record.run import Run
from gradwire.sim.timeline import Timeline, simulate


class Predicted(NamedTuple):
    """A timeline, or the reason why there is none."""

    timeline: Timeline | None
    why_not: str = ""


def predicted(run: Run, folder: Path) -> Predicted:
    """Simulate the run's plan with the profile.json, cluster.json and costs.json of the folder."""
    if not (folder / "profile.json").exists():
        return Predicted(
            None,
            "The step was not predicted: the folder has no profile.json. Call handle.profile() with the run's folder before "
            "handle.record().",
        )
    try:
        profile, cluster = Profile.load(folder / "profile.json"), Cluster.load(folder / "cluster.json")
        costs = Costs.load(folder / "costs.json") if (folder / "costs.json").exists() else Costs(codecs=())
        return Predicted(simulate(run.plan, profile, cluster, costs))
    except GradwireError as error:
        return Predicted(None, f"The step was not predicted: {error}")
