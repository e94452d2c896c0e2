"""Times of encodes and decodes, from measured points."""

from bisect import bisect_right

from gradwire.core.checks import show
from gradwire.core.costs import Costs, Points
from gradwire.core.specs import Spec
from gradwire.errors import PlanError


def time_at(points: Points, nbytes: float) -> float:
    """Microseconds at a size: linear between points, and along the last two points beyond them.

    Below the first point the time stays that of the first point: it is the time of a launch. A single point is a constant. Beyond
    the last point times never fall: if the last two points do, noise is the likelier reason.

    >>> points = ((1000, 10.0), (2000, 30.0))
    >>> time_at(points, 10), time_at(points, 1500), time_at(points, 3000)
    (10.0, 20.0, 50.0)
    """
    if nbytes <= points[0][0] or len(points) == 1:
        return points[0][1]
    right = min(bisect_right(points, nbytes, key=lambda point: point[0]), len(points) - 1)
    (low, before), (high, after) = points[right - 1], points[right]
    slope = (after - before) / (high - low)
    return before + slope * (nbytes - low) if nbytes <= high else after + max(0.0, slope) * (nbytes - high)


class CodecTimes:
    """Looks up times of a costs file by spec and device."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self._codecs = {(codec.spec, codec.device): codec for codec in costs.codecs}

    def __contains__(self, codec: tuple[Spec, str]) -> bool:
        """Whether a spec was measured on a device."""
        return codec in self._codecs

    def points(self, spec: Spec, device: str, what: str) -> Points:
        """The measured points; what: 'encode' or 'decode'. Raises PlanError if there are none."""
        codec = self._codecs.get((spec, device))
        if codec is None:
            known = ", ".join(f"{show(codec.spec)} on {codec.device}" for codec in self.costs.codecs) or "none"
            raise PlanError(
                f"costs have no times of {spec!r} on {device}, so no step with this codec can be timed. They have: {known}. Time "
                "its encode and decode on that device at a small and a large size, and add an entry to codecs: "
                '{"spec": ..., "device": ..., "encode": [[bytes, microseconds], ...], "decode": [...]}.'
            )
        return codec.encode if what == "encode" else codec.decode
