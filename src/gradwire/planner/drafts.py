"""Drafts: candidate plans. A search prices and simulates many drafts, and makes a Plan of the best one.

A `PlanningJob` holds all inputs of a search: the model's times, the cluster, the costs, and the choices of spec and option.
"""

import copy
from collections.abc import Sequence
from functools import cache, cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import msgspec

from gradwire.core import (
    COLLECTIVES,
    ENCODED_DTYPES,
    Backward,
    Bucket,
    Cluster,
    Costs,
    Identity,
    Plan,
    Prediction,
    Profile,
    Spec,
    TensorProfile,
    fingerprint,
    flags,
    gathers_of,
    pairs_ranks,
    schedule_class,
    word,
)
from gradwire.costs import AffineCost, Bytes, bytes_of, fold
from gradwire.errors import PlanError
from gradwire.plan import DEVICES, RESTRICTED, Option, carries, launch_of, tasks_of
from gradwire.planner.listing import choose_options
from gradwire.planner.offload import on_cpu
from gradwire.planner.partition import FusionCosts
from gradwire.planner.programs import Pricer, least_alone_us, least_step_us
from gradwire.sim import (
    FS_PER_US,
    MOST_LINK_TASKS,
    NEVER,
    LightPlan,
    Replayer,
    ReplayProgram,
    Rules,
    Simulator,
    as_ddp,
    device_of,
    fs_of,
    launch_key,
    rules_of,
)

_BESIDE_TREE = ("grid", "ring", "tree")
"""Collectives that all searches may choose, except those of other systems: ByteComp's tree does not have them."""
_MOST_ENCODES = 4
"""Most encodes of an element, where `Limits.max_encodes` is None. No option of the tree has more."""
BYTECOMP_ONLY = ("all-compressed", "myopic")
"""Restricted searches that have the whole tree, and restrict how options are chosen."""
PLANNED_SCHEDULES = ("backward", "pipelined")
"""Schedules that cost no accuracy, for which whole plans are searched."""


class Choice(NamedTuple):
    """The spec and the option of a bucket."""

    spec: Spec
    option: tuple[str, ...]

    @property
    def encodes(self) -> bool:
        """Whether anything is compressed."""
        return self.spec.encodes


class Part(NamedTuple):
    """A bucket of a draft."""

    tensors: tuple[int, ...]
    """Indices of the tensors in gradient-ready order, ascending."""
    choice: Choice


class Draft(NamedTuple):
    """Buckets in the order in which they become ready, and the launch order's skew (`gradwire.sim.replay`)."""

    parts: tuple[Part, ...]
    skew: int = 1


class TensorClass(NamedTuple):
    """Tensors that may share buckets, in gradient-ready order. gaps_us: microseconds of backward between their gradients."""

    places: list[int]
    gaps_us: list[float]
    nbytes: list[int]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of a plan. None: no limit."""

    devices: tuple[str, ...] | None = None
    """Devices that may encode and decode; None: the devices for which the costs have times of every spec."""
    max_encodes: int | None = None
    """Most encodes of an element in one option; every hop of a compressed ring or tree is one. None: 4."""
    memory_bytes: int | None = None
    """Most extra memory on the gradients' device, as in `Prediction`."""
    exempt_vectors: bool = True
    """Whether tensors of one dimension or none stay uncompressed, as in `Policy`."""
    restrict: str | None = None
    """A restricted search of ByteComp (section 5.3): a key of `gradwire.plan.schemes.RESTRICTED`, or myopic. myopic and
    all-compressed need the method bytecomp."""
    schedule: str = "backward"
    """The schedule that the plan runs, one that costs no accuracy: backward, or pipelined (DeAR, section 3)."""

    def __post_init__(self) -> None:
        word("schedule", self.schedule, PLANNED_SCHEDULES, error=PlanError)
        flags(self, "exempt_vectors")
        if self.devices is not None and not self.devices:
            raise PlanError(
                "devices (--devices) is an empty list, so nothing could encode. Name gpu, cpu or both, or leave it out for all "
                "devices that were measured."
            )
        for device in self.devices or ():
            word("devices (--devices)", device, DEVICES, error=PlanError)
        if self.restrict is not None:
            word("restrict", self.restrict, (*RESTRICTED, "myopic"), error=PlanError)
        if self.devices is not None and self.restrict in DEVICES and self.restrict not in self.devices:
            raise PlanError(
                f"restrict (--restrict) is {self.restrict!r}, and devices (--devices) has {', '.join(self.devices)} alone: "
                f"nothing could encode. Add {self.restrict} to devices, or leave out one of the two."
            )

    def in_backward(self) -> "Limits":
        """Return these limits with plain DDP's schedule."""
        return msgspec.structs.replace(self, schedule="backward")


class PlanningJob:
    """One planning job. Raises PlanError if the cluster has one rank, or if no option is left.

    specs: the specs that the plan may use; uncompressed exchange is always allowed. rules: None is gradwire's engine on the
    profile's device. options: None is the whole tree, with codecs on the gradients' device; options with codecs on the CPU are
    derived from these. Given options count for all specs, as in the papers' simulations, even if the engine could not run them.
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        costs: Costs,
        specs: Sequence[Spec] = (),
        limits: Limits | None = None,
        rules: Rules | None = None,
        options: Sequence[Option] | None = None,
    ) -> None:
        if cluster.world_size == 1:
            raise PlanError(
                "the cluster has 1 rank: one rank exchanges nothing, so there is nothing to plan. Give 2 ranks or more."
            )
        self.profile, self.cluster, self.limits = profile, cluster, limits or Limits()
        self.rules = rules or rules_of(device_of(profile), cluster)
        self.schedule = schedule_class(self.limits.schedule)()
        self.event_by_event = self.rules.lanes > 0 or self.schedule.gathers_in_forward
        """Whether steps are simulated event by event, which takes a hundred times as long as `line`."""
        self.simulator = Simulator(profile, cluster, costs, self.rules)
        self.pricer = Pricer(self.simulator)
        tensors = profile.tensors
        self.line = Replayer(
            self.simulator.optimizer + sum(fs_of(t.forward_us or 0.0) for t in tensors),
            [fs_of(t.backward_us) for t in tensors],
            self.simulator.workers,
        )
        self.exempt = exempt_of(profile, self.limits)
        """The tensors that must stay uncompressed."""
        self.embeddings = frozenset(place for place, tensor in enumerate(tensors) if tensor.embedding)
        """The tensors with rows that are looked up: a spec without a code for zero would change rows that no batch uses."""
        self._mixed = len({tensor.dtype for tensor in tensors}) > 1
        self.specs = tuple(spec for spec in specs if spec.encodes)
        self.size = cache(self._size)
        """The sizes of a bucket of these tensors."""
        self.program = cache(self._program)
        """A bucket's tasks."""
        self.classes = cache(self._classes_of)
        """The classes of tensors for a spec. Tensors of a class have one dtype, and all of them may have the spec, or none."""
        self._folded = cache(fold)
        self.fusion_costs = cache(self._fusion_costs)
        """The costs of a bucket of any size for a choice, from the simulator's prices; strategies of fusion use them. Exchanges
        take the sum of the times on all links, or, with `busiest`, the time on the busiest link. Decodes that delay compute count
        with encodes, unless `exposed` is set."""
        self._given = options
        self._allow()

    def _allow(self) -> None:
        """Set the options within the limits."""
        own, options, cluster = self.rules.device, self._given, self.cluster
        codecs = self.simulator.prices.codecs
        measured = [device for device in DEVICES if all((spec, device) in codecs for spec in self.specs)]
        restrict = self.limits.restrict
        devices = (restrict,) if restrict in DEVICES else tuple(measured) if self.limits.devices is None else self.limits.devices
        if own == "cpu" and options is None and "gpu" in devices:
            devices = tuple(device for device in devices if device == own)
            if not devices and self.specs:
                raise PlanError(
                    f"the profile is of a CPU, where its gradients are encoded, and {self.specs[0]!r} may be encoded on a GPU "
                    "alone, by --devices or by the times in costs. Measure codecs on that CPU, or the profile on the GPU."
                )
        main = own if own in devices else next(iter(devices), own)
        self.options = options or options_within(cluster, main, self.limits.max_encodes, restrict, must_compress=bool(self.specs))
        self.offloads = main == "gpu" and "cpu" in devices
        self.plain = [Choice(Identity(), o.tasks) for o in self.options if not o.compresses]
        given = None if options is None else [option.tasks for option in options if option.compresses]
        self.coded = {spec: self._carrying(spec, main) if given is None else given for spec in self.specs}
        """The options that can carry a spec's payloads, by spec."""
        self.beside = {spec: self._beside_tree(spec, main) if given is None else [] for spec in self.specs}
        """Further options that can carry a spec's payloads, which ByteComp's tree does not have."""
        self._judged = cache(self._judge)
        self.evaluations = 0

    def restricted(self, restrict: str) -> "PlanningJob":
        """A copy of this job within a restriction, with the same prices. Raises PlanError as a new job would."""
        job = copy.copy(self)
        job.limits = Limits(**(msgspec.structs.asdict(self.limits) | {"restrict": restrict}))  # older msgspec replaces unchecked
        job._allow()
        return job

    def _carrying(self, spec: Spec, device: str) -> list[tuple[str, ...]]:
        """The allowed options that can carry a spec's payloads, and the all-reduce of payloads that can be added on the wire.

        Raises PlanError if there are none.
        """
        found = [option.tasks for option in self.options if option.compresses]
        found = [tasks for tasks in found if carries(tasks, spec, self.rules.device)]
        most, anywhere = self.limits.max_encodes, self.limits.restrict in (None, *DEVICES, *BYTECOMP_ONLY)
        most_rounds = MOST_LINK_TASKS if most is None else min(most, MOST_LINK_TASKS)
        if 0 < spec.rounds <= most_rounds and device == self.rules.device and anywhere:
            found.append(tasks_of("allreduce", device, spec))
        if not found:
            rounds = f" in {spec.rounds} rounds, and plans have at most {MOST_LINK_TASKS}" * (spec.rounds > MOST_LINK_TASKS)
            raise PlanError(
                f"no allowed option can carry payloads of {spec!r}: they travel only by {' or '.join(spec.schemes)}{rounds}. "
                f"max_encodes is {most}, restrict is {self.limits.restrict!r}. Leave out the spec, or the limits."
            )
        return found

    def _beside_tree(self, spec: Spec, device: str) -> list[tuple[str, ...]]:
        """Grid, ring and tree on the gradients' device, if they can carry the spec and encode an element seldom enough."""
        if self.limits.restrict not in (None, *DEVICES) or device != self.rules.device:
            return []
        most = _MOST_ENCODES if self.limits.max_encodes is None else self.limits.max_encodes
        options = [COLLECTIVES[name].on(device) for name in _BESIDE_TREE if COLLECTIVES[name].carries(spec)]
        steps = {option: self.simulator.prices.steps(option, spec.rounds) for option in options}
        return [
            option for option in options if sum(each.parts for each in steps[option] if each.task.startswith("comp:")) <= most
        ]

    def may(self, tensors: Sequence[int], choice: Choice) -> bool:
        """Whether these tensors may share a bucket. All must have one dtype. If the choice compresses, one of them must not be
        exempt, and exempt ones must be able to travel uncompressed in the same payload. Embeddings need a code for zero."""
        if self._mixed and len({self.profile.tensors[place].dtype for place in tensors}) > 1:
            return False
        if self.embeddings and not (choice.spec.keeps_zeros or self.embeddings.isdisjoint(tensors)):
            return False
        raw = self.exempt.intersection(tensors)
        return not (choice.encodes and raw) or (choice.spec.carries_uncompressed and len(raw) < len(tensors))

    def _classes_of(self, spec: Spec) -> list[TensorClass]:
        tensors, choice = self.profile.tensors, Choice(spec, ())
        found: dict[tuple[str, bool], list[int]] = {}
        for place, tensor in enumerate(tensors):
            found.setdefault((tensor.dtype, self.may((place,), choice)), []).append(place)
        classes = []
        for places in found.values():
            ready = [0, *(place + 1 for place in places)]
            gaps = [sum(each.backward_us for each in tensors[start:end]) for start, end in pairwise(ready)]
            classes.append(TensorClass(places, gaps, [tensors[place].nbytes for place in places]))
        return classes

    def _size(self, tensors: tuple[int, ...], spec: Spec) -> Bytes:
        raw = self.exempt.intersection(tensors) if spec.encodes else frozenset()
        if len(raw) == len(tensors):
            raw = frozenset()
        members = [self.profile.tensors[place] for place in tensors if place not in raw]
        return bytes_of(members, spec, [self.profile.tensors[place] for place in raw])

    def _fusion_costs(self, choice: Choice, busiest: bool = False, exposed: bool = False) -> FusionCosts:
        folded = self._folded(choice.option, choice.spec, self.simulator.prices)
        rules, nothing = self.rules, AffineCost(0.0, 0.0)
        on_compute = rules.codec_on == "compute" and choice.option[-1] == f"decomp:{rules.device}"
        lumped = rules.decode == "with encode" or (rules.decode == "at once" and on_compute)
        return FusionCosts(
            encode=folded.encode,
            exchange=folded.busiest if busiest else folded.exchange,
            decode=nothing if rules.decode == "none" else folded.decode,
            decoding="lumped" if lumped and not exposed else "exposed",
        )

    def _program(self, part: Part) -> ReplayProgram:
        spec, option = part.choice
        return self.pricer.program(option, spec, self.size(part.tensors, spec))

    def programs(self, tensors: tuple[int, ...], choices: Sequence[Choice]) -> list[ReplayProgram]:
        """The tasks of one bucket, for each choice."""
        return [self.program(Part(tensors, choice)) for choice in choices]

    def choices(self, most: int = 10) -> list[Choice]:
        """Uncompressed and compressed choices that can be the best of some bucket, judged at three sizes of the model.

        An option is left out if at each size another option takes no more time on every resource, and no more time in sequence.
        The other options are ordered by their time in sequence; each spec has at most `most`.
        """
        found = self._judged(Identity())[:most]
        for spec in self.specs:
            kept = self._judged(spec)[:most]
            movable = [choice.option for choice in kept if choice.option in self.coded[spec]] if self.offloads else []
            moved = [on_cpu(option) for option in movable[: most // 2]]
            found += kept + [Choice(spec, option) for option in moved if carries(option, spec, self.rules.device)]
        return found

    def _judge(self, spec: Spec) -> list[Choice]:
        options = self.coded[spec] + self.beside[spec] if spec.encodes else [choice.option for choice in self.plain]
        choices = [Choice(spec, option) for option in options]
        if not self.schedule.gathers_in_forward:
            return _undominated(self, choices)
        # what gathers in the forward may take longer in sum, and the step be shorter
        gathering = [choice for choice in choices if gathers_of(choice.option)]
        return list(dict.fromkeys([*_undominated(self, gathering), *_undominated(self, choices)]))

    def step(self, draft: Draft, limit: int = NEVER) -> int | None:
        """Femtoseconds of a draft's step; None if the step is above `limit` or the draft needs more memory than allowed."""
        self.evaluations += 1
        allowed = self.limits.memory_bytes
        if allowed is not None and self.extra_bytes(draft) > allowed:
            return None
        if self.event_by_event:
            step = round(self.simulator.step_us(self.light(draft)) * FS_PER_US)
            return step if step <= limit else None
        releases = [part.tensors[-1] + 1 for part in draft.parts]
        return self.line.step([*map(self.program, draft.parts)], releases, draft.skew, limit)

    def extra_bytes(self, draft: Draft) -> int:
        """Bytes of memory beyond plain training: flat buffers, and for compressed buckets the payload and the spec's state."""
        total = 0.0
        for tensors, choice in draft.parts:
            size = self.size(tensors, choice.spec)
            numel = sum(self.profile.tensors[place].numel for place in tensors)
            encodes = sum(task.startswith("comp") for task in choice.option)
            total += size.raw + (size.first + numel * choice.spec.state_bytes) * min(1, encodes)
        return round(total)

    def light(self, draft: Draft) -> LightPlan:
        """The buckets and the launch order of a draft."""
        buckets = self._buckets(draft)
        if self.schedule.gathers_in_forward:
            return LightPlan(buckets, launch_of(buckets, self.schedule), self.schedule)
        keyed = sorted(
            (launch_key(index, phase, draft.skew), index, word)
            for index, bucket in enumerate(buckets)
            for phase, word in enumerate(bucket.link_tasks)
        )
        return LightPlan(buckets, [(index, word) for _, index, word in keyed], self.schedule)

    def _buckets(self, draft: Draft) -> list[Bucket]:
        tensors = self.profile.tensors
        return [
            Bucket(
                tensors=tuple(tensors[place].name for place in part.tensors),
                spec=self._specs(part),
                reduce_dtype="float32" if part.choice.encodes else tensors[part.tensors[0]].dtype,
                option=part.choice.option,
                numel=sum(tensors[place].numel for place in part.tensors),
            )
            for part in draft.parts
        ]

    def _specs(self, part: Part) -> Spec | dict[str, Spec]:
        own = part.choice.spec
        if not own.encodes or self.exempt.isdisjoint(part.tensors):
            return own
        return {self.profile.tensors[p].name: Identity() if p in self.exempt else own for p in part.tensors}

    def plan(self, draft: Draft, baseline: Draft) -> Plan:
        """The plan of a draft, with the predicted steps of the plan and of the baseline."""
        light = self.light(draft)
        priced = [self.simulator.prices.of(bucket) for bucket in light.buckets]
        prediction = Prediction(
            step_us=self.simulator.step_us(light),
            baseline_step_us=self._ddp_simulator.step_us(self.light(baseline)._replace(schedule=Backward())),
            lower_bound_us=self.lower_bound_us(),
            bytes_per_rank=round(sum(price.sent_bytes * p.pieces for p in priced for price in p.tasks)),
            extra_bytes_device=self.extra_bytes(draft),
            extra_bytes_host=0,
        )
        prints = fingerprint(self.profile.tensor_infos(self.rules.device))
        return Plan(
            fingerprint=prints,
            buckets=tuple(light.buckets),
            launch=tuple(light.launch),
            schedule=light.schedule,
            prediction=prediction,
        )

    @cached_property
    def _ddp_simulator(self) -> Simulator:
        cluster, rules = as_ddp(self.cluster, self.rules)
        if (cluster, rules) == (self.cluster, self.rules):
            return self.simulator
        return Simulator(self.profile, cluster, self.simulator.prices.costs, rules)

    def lower_bound_us(self) -> float:
        """Microseconds of a step that no plan with these choices can beat: computation alone where gathers hide in the forward,
        or else `least_step_us`."""
        if self.schedule.gathers_in_forward:
            return self.line.after[-1] / FS_PER_US
        plain = [choice.option for choice in self.plain]
        moved = {spec: [on_cpu(option) for option in options] for spec, options in self.coded.items() if self.offloads}
        return least_step_us(self.pricer, self.line.after, self._exemptions(), self.specs, plain, self._all_coded(), moved)

    def least_alone(self) -> int:
        """Femtoseconds of a step that no plan of these choices with every tensor alone can beat. See `least_alone_us`."""
        plain = [choice.option for choice in self.plain]
        after = [0, 0] if self.schedule.gathers_in_forward else self.line.after
        return int(least_alone_us(self.pricer, after, self._exemptions(), plain, self._all_coded()) * FS_PER_US)

    def _all_coded(self) -> dict[Spec, list[tuple[str, ...]]]:
        return {spec: options + self.beside[spec] for spec, options in self.coded.items()}

    def _exemptions(self) -> list[tuple[TensorProfile, bool]]:
        return [(tensor, place in self.exempt) for place, tensor in enumerate(self.profile.tensors)]


def exempt_of(profile: Profile, limits: Limits) -> frozenset[int]:
    """The tensors that must stay uncompressed: those of dtypes that compressors do not take, and vectors if the limits say so."""
    return frozenset(
        place
        for place, tensor in enumerate(profile.tensors)
        if tensor.dtype not in ENCODED_DTYPES or (limits.exempt_vectors and len(tensor.shape) < 2)
    )


def _undominated(job: PlanningJob, choices: Sequence[Choice]) -> list[Choice]:
    sizes = sorted(tensor.nbytes for tensor in job.profile.tensors)
    total = sum(sizes)
    by_size = sorted((tensor.nbytes, place) for place, tensor in enumerate(job.profile.tensors))
    middle, largest = by_size[len(by_size) // 2][1], by_size[-1][1]
    samples = [(middle,), (largest,), tuple(range(len(sizes)))] if total else [(largest,)]
    kept: dict[Choice, int] = {}
    for tensors in samples:
        costs = []
        for choice in choices:
            program = job.program(Part(tensors, choice))
            compute, pool, intra, inter = program.busy
            costs.append((sum(program.busy), compute + pool, intra, inter, program.codecs, choice))
        front: list[tuple[int, ...]] = []
        for _, codec, intra, inter, _, choice in sorted(costs, key=lambda cost: cost[:5]):
            if not any(c <= codec and i <= intra and e <= inter for c, i, e in front):
                front.append((codec, intra, inter))
                kept[choice] = min(kept.get(choice, NEVER), len(front))
    return sorted(kept, key=lambda choice: kept[choice])


def numbered(cures: Sequence[str]) -> str:
    """The cures as a numbered list.

    >>> numbered(["allow 2 encodes", "allow gpu"])
    'Any one of these helps: 1. allow 2 encodes; 2. allow gpu.'
    """
    if len(cures) == 1:
        return f"What helps: {cures[0]}."
    return f"Any one of these helps: {'; '.join(f'{place}. {cure}' for place, cure in enumerate(cures, 1))}."


def options_within(
    cluster: Cluster, device: str, max_encodes: int | None, restrict: str | None, must_compress: bool
) -> tuple[Option, ...]:
    """The options on a cluster with codecs on one device, within limits.

    Raises PlanError with numbered cures if `must_compress` and no option is left that compresses.
    """
    part = None if restrict in BYTECOMP_ONLY else restrict
    limits: dict[str, Any] = {
        "nodes": cluster.nodes,
        "ranks_per_node": cluster.ranks_per_node,
        "devices": (device,),
        "max_encodes": max_encodes,
        "restrict": part,
    }
    even = cluster.ranks_per_node_if_even is not None

    def choose(**other: Any) -> tuple[Option, ...]:
        return tuple(each for each in choose_options(**limits | other) if even or not pairs_ranks(each.tasks))

    def count(**other: Any) -> int:
        return sum(option.compresses for option in choose(**other))

    found = choose()

    if not must_compress or any(option.compresses for option in found):
        return found
    cures = []
    for encodes in range((max_encodes or 0) + 1, 5) if max_encodes is not None else ():
        if left := count(max_encodes=encodes):
            cures.append(f"allow {encodes} encode{'s' * (encodes > 1)} (max_encodes, leaves {left} options)")
            break
    if part is not None and (left := count(restrict=None)):
        cures.append(f"search without restrict={restrict!r} (leaves {left} options)")
    if 1 in (cluster.nodes, cluster.ranks_per_node) and (left := count(nodes=2, ranks_per_node=2)):
        cures.append(f"plan for several nodes of several ranks, which have two links (leaves {left} options)")
    if max_encodes is not None and part is not None and not cures:
        cures.append(f"drop both limits (leaves {count(max_encodes=None, restrict=None)} options)")
    cures.append("give no spec, for a plan without compression")
    raise PlanError(
        f"no option is left that compresses: {cluster.nodes} nodes of {cluster.ranks_per_node} ranks, codecs on {device}, "
        f"max_encodes={max_encodes}, restrict={restrict!r}. The plan could not use the specs. {numbered(cures)}"
    )
