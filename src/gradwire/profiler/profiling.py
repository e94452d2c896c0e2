"""Profiles an ordinary training loop, for `handle.profile`."""

import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import msgspec
import torch

from gradwire.core import Cluster, Costs, Identity, Made, Profile, Spec, TensorProfile, make_folder, whole
from gradwire.costs import Fit, time_at
from gradwire.engine import Session
from gradwire.errors import PlanError, StepStateError
from gradwire.exchange import Exchange, info_of
from gradwire.plan import Uniform
from gradwire.profiler.codecs import measure_codecs
from gradwire.profiler.links import measure_links, measure_processors, measured_links
from gradwire.profiler.model import launch_time_us, model_times, slowest
from gradwire.profiler.recorder import WARMUP_STEPS, Recorder
from gradwire.transport import Link, LinkError, device_name, transfer

T = TypeVar("T")

_SHOWN_BYTES = 2**20
_SMALL_TENSORS, _SMALL_ELEMENTS, _SMALL_STEPS = 32, 256, 12
_SMALL_POLICY = Uniform(Identity(), scheme="alltoall", bucket_bytes=1, edge_bytes=1)
"""The plan, and tensors of few bytes, that measure the processor time of an exchange. Each tensor has a bucket of its own."""


class Profiling:
    """Records the training loop inside the `with` block, then measures links and codecs, and writes three files.

    `handle.profile(folder, steps, specs)` makes this context. All ranks enter with the same number of steps. Training
    is not affected. The loop must make 3 steps for warm-up and then twice `steps`: in every second one exchanges wait
    for the end of backward, so that computation is measured alone. Further steps are not recorded. `specs` are measured
    in addition to the specs of the handle's plan.

    Rank 0 writes profile.json, cluster.json and costs.json into the folder; all ranks have the fields below. Each link
    and each spec takes about a second. Rank 0 warns if the times of a link do not follow latency and rate. A rank that
    is alone has no link: it writes no cluster.json, and `cluster` is None.

    Raises StepStateError if the loop made too few steps, or if the plan changed, as `plan="auto"` does if a link slows down.

    Example::

        with handle.profile("measured", steps=20) as measured:
            for batch in itertools.islice(loader, 43):
                train_one_step(batch)
        print(measured.cluster)
    """

    profile: Profile
    cluster: Cluster | None
    costs: Costs
    fits: dict[str, Fit]
    """The fit of each link: intra, inter, allreduce, and on CPUs ddp."""

    def __init__(self, session: Session, folder: str | os.PathLike[str], steps: int, specs: Sequence[Spec]) -> None:
        whole("steps", steps, "steps to measure with exchanges, and as many without", low=1, error=PlanError)
        schedule = session.plan.schedule
        if not session.schedule.traits.sends_in_backward or schedule.gathers_in_forward:
            raise PlanError(
                f"this handle runs the schedule {schedule!r}, in which steps overlap. Profile with the "
                "backward schedule; what is measured serves all."
            )
        self._session, self._schedule, self._group = session, session.schedule, session.group
        self._folder, self._steps, self._specs = Path(folder), steps, specs

    def __enter__(self) -> Self:
        self._recorder = Recorder(self._session, self._steps)
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        recorder = self._recorder
        recorder.remove()
        if error is not None:
            return
        if self._session.schedule is not self._schedule or recorder.plan not in (None, self._session.plan):
            raise StepStateError(
                f"the plan changed inside profile(steps={self._steps}), so its steps cannot be compared. Profile again, or pass "
                "a fixed plan."
            )
        if not recorder.steps:
            raise StepStateError(
                f"no step inside profile(steps={self._steps}) began with a call of the model, so its forward hooks did not run. "
                "Call the model itself, not its parts or its forward method."
            )
        if recorder.seen < recorder.wanted:
            raise StepStateError(
                f"the loop made {recorder.seen} steps inside profile(steps={self._steps}), which needs {recorder.wanted}: "
                f"{WARMUP_STEPS} for warm-up, {self._steps} with exchanges and as many without. Run more steps, or lower steps=."
            )
        self._measure(recorder)
        if self._group.rank == 0:
            make_folder(self._folder)
            self.profile.save(self._folder / "profile.json")
            if self.cluster is not None:
                self.cluster.save(self._folder / "cluster.json")
            self.costs.save(self._folder / "costs.json")

    def _measure(self, recorder: Recorder) -> None:
        quiet, loaded = (slowest(self._of_all_ranks(recorder.rows(quiet))) for quiet in (True, False))
        device, plan = recorder.clock.device, self._session.plan
        self.cluster, self.fits = self._links(device) if self._group.world_size > 1 else (None, {})
        of_plan = [bucket.spec_of(name) for bucket in plan.buckets for name in bucket.tensors]
        self.costs = measure_codecs([*of_plan, *self._specs], device, offload=True)
        self.profile = profile_from(recorder, self._session, quiet, loaded)
        if device.type == "cpu" and self.cluster is not None:
            per_node = self.cluster.ranks_per_node
            processors = self._on_lane(lambda link: measure_processors(link, per_node), "how many ranks share a processor")
            own_us = torch.tensor([[self._launch_us(self.cluster)]], dtype=torch.float64)
            launch_us = slowest(self._of_all_ranks(own_us)).item()
            self.cluster = msgspec.structs.replace(self.cluster, launch_us=launch_us, processors=processors)

    def _launch_us(self, cluster: Cluster) -> float:
        """Processor time of an exchange of few bytes beyond that of its link: of lanes, threads and the caller."""
        tensors = {str(number): torch.ones(_SMALL_ELEMENTS) for number in range(_SMALL_TENSORS)}
        infos = [info_of(name, tensor) for name, tensor in tensors.items()]
        plan = _SMALL_POLICY.plan(infos, cluster.world_size, cluster.ranks_per_node)
        exchange = Exchange.on(self._session.lanes, tensors, plan, 0)
        times_us = []
        for _ in range(_SMALL_STEPS):
            began_s = time.process_time()
            exchange.begin()
            for name, tensor in tensors.items():
                exchange.ready(name, tensor)
                exchange.wait(name)  # so that threads sleep and wake, as between gradients
            exchange.wait()
            times_us.append(1e6 * (time.process_time() - began_s))
        profiles = [TensorProfile(name=info.name, shape=info.shape, dtype=info.dtype, backward_us=0.0) for info in infos]
        return launch_time_us(plan, profiles, cluster, self.costs, statistics.median(times_us))

    def _links(self, device: torch.device) -> tuple[Cluster, dict[str, Fit]]:
        """Measure the links. Rank 0 warns of a bad fit."""
        grid = self._group.grid
        group = self._group.process_group if device.type == "cpu" else None
        far = self._session.lanes.far_lanes
        measure = partial(measure_links, grid=grid, device=device, process_group=group, far_lanes=far)
        cluster, fits, problems = measured_links(self._on_lane(measure, "the exchanges that measure links"), grid)
        for problem in problems if self._group.rank == 0 else ():
            warnings.warn(problem, stacklevel=4)
        return cluster, fits

    def _on_lane(self, measure: Callable[[Link], T], what: str) -> T:
        """The result of a measurement on a lane. what: the measurement, for the error if a link fails."""
        try:
            return self._session.lanes.data[0].submit(measure).result()
        except LinkError as error:
            raise self._session.lanes.broken(what, error, self._session.reducer.step) from error

    def _of_all_ranks(self, rows: torch.Tensor) -> torch.Tensor:
        """Gather the rows of all ranks. Returns a tensor (ranks, steps, columns)."""

        def gather(link: Link) -> torch.Tensor:
            received = torch.empty(link.world_size * rows.numel(), dtype=rows.dtype)
            with transfer():
                link.all_gather(received, rows.reshape(-1)).wait()
            return received.reshape(link.world_size, *rows.shape)

        try:
            return self._session.lanes.control.submit(gather).result()
        except LinkError as error:
            raise self._session.lanes.broken("the times that ranks recorded", error, self._session.reducer.step) from error


def profile_from(recorder: Recorder, session: Session, quiet: torch.Tensor, loaded: torch.Tensor) -> Profile:
    """Return the profile. quiet, loaded: rows, slowest over ranks."""
    infos = [info_of(name, parameter) for name, parameter in session.parameters.items()]
    found = model_times(infos, recorder.modules, quiet, loaded, recorder.entered)
    device = recorder.clock.device
    return Profile(
        model=type(session.model).__name__,
        batch=recorder.batch,
        device=device_name(device),
        steps=len(quiet),
        optimizer_us=found.optimizer_us,
        loaded_backward_us=found.loaded_backward_us,
        processor_part=found.processor_part if device.type == "cpu" else None,
        made=Made.now(),
        tensors=tuple(found.tensors),
    )


def described(found: Profiling) -> str:
    """Describe the model's times, each link with the quality of its fit, and the codecs at 1 MiB of gradient."""
    profile, cluster = found.profile, found.cluster
    forward = sum(tensor.forward_us or 0.0 for tensor in profile.tensors)
    backward = sum(tensor.backward_us for tensor in profile.tensors)
    megabytes = sum(tensor.nbytes for tensor in profile.tensors) / 1e6
    lines = [
        f"{profile.model}: {len(profile.tensors)} tensors, {megabytes:.2f} MB of gradients, batch {profile.batch}, medians of "
        f"{profile.steps} steps on {profile.device}",
        f"  forward {_ms(forward)}, backward {_ms(backward)} ({_ms(profile.loaded_backward_us or 0.0)} during exchanges), "
        f"optimizer {_ms(profile.optimizer_us or 0.0)}",
    ]
    for name, fit in found.fits.items():
        lines.append(
            f"{name}: {fit.alpha_us:.0f} us + {fit.us_per_byte * 1e3:.4f} us for each 1000 bytes that a rank holds "
            f"({len(fit.points)} times, R2 {fit.r2:.4f}, worst error {100 * fit.worst_relative_error:.0f} %)"
        )
    if cluster is not None:
        lines += _described_cluster(cluster)
    for codec in found.costs.codecs:
        curves = (codec.encode, codec.decode, codec.weigh or ((0, 0.0),))
        encode, decode, weigh = (time_at(points, _SHOWN_BYTES) for points in curves)
        lines.append(f"{codec.spec!r} on {codec.device}: 1 MiB encoded in {encode + weigh:.0f} us, decoded in {decode:.0f} us")
    return "\n".join(lines) + "\n"


def _described_cluster(cluster: Cluster) -> Iterator[str]:
    yield f"cluster: {cluster.nodes} x {cluster.ranks_per_node} ranks"
    if cluster.launch_us is not None:
        yield f"  each exchange takes {cluster.launch_us:.0f} us of the processor"
    if cluster.processors is not None:
        yield f"  {cluster.processors / cluster.ranks_per_node:.2g} processors for each rank"
    links = {name: getattr(cluster, name) for name in ("intra", "inter", "allreduce", "ddp")}
    for name, link in links.items():
        if link:
            further = "" if link.message_us is None else f", a further message {link.message_us:.0f} us"
            yield f"  {name} {link.alpha_us:.0f} us{further}, {link.gbps:.4g} Gb/s"


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f} ms"
