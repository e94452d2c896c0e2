"""Policies: rules by tensor name from which a plan follows without measurement.

>>> from gradwire.core import QSGD, Identity, TensorInfo
>>> policy = Policy(default=QSGD(bits=4), rules=[("*.bias", Identity())])
>>> plan = policy.plan([TensorInfo("fc.bias", (10,), "float32"), TensorInfo("fc.weight", (10, 64), "float32")])
>>> [(bucket.tensors, bucket.option) for bucket in plan.buckets][0]
(('fc.bias',), ('allreduce:inter',))
>>> plan.launch
((0, 'allreduce'), (1, 'alltoall'), (1, 'allgather'))
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from gradwire.core.checks import changed, freeze, unique, whole, word
from gradwire.core.collectives import ALL_REDUCE, collective
from gradwire.core.plan import RESIDUAL_DTYPES, Bucket, Plan
from gradwire.core.schedules import Backward, Schedule, as_schedule
from gradwire.core.specs import Identity, Spec, as_spec
from gradwire.core.strict import Document
from gradwire.core.tensors import TensorInfo, fingerprint
from gradwire.errors import PlanError
from gradwire.planner.rules import Where, as_rule, useless
from gradwire.planner.schemes import check_scheme, tasks_of

if TYPE_CHECKING:
    SpecField: TypeAlias = Spec
    RulesField: TypeAlias = Sequence[tuple[str | Where, Spec]]
    ScheduleField: TypeAlias = Schedule | str
else:
    SpecField = RulesField = ScheduleField = Any  # brought to one form by __post_init__


_EXEMPT = Identity()
_PATTERN = frozenset("*?[|")
"""What makes a pattern of a name, as `Where` reads them."""


class Policy(Document, frozen=True, kw_only=True):
    """Which spec each tensor gets, by the first rule whose pattern matches its name, and how buckets are made."""

    what: ClassVar[str] = "policy"
    remedy: ClassVar[str] = "Write it from the fields of gradwire.Policy."
    omit_at_default: ClassVar[tuple[str, ...]] = ("rules", "exempt_vectors", "scheme", "bucket_bytes", "residual_dtype")

    default: SpecField
    """Spec of the tensors that no rule matches."""
    rules: RulesField = ()
    """(which, spec) pairs, the first match wins. `which` is a pattern as in fnmatch, case counts, on whole tensor names, with
    | between alternatives ("*.bias|*norm*"), or a `Where`, which knows sizes, dimensions and dtypes too."""
    exempt_vectors: bool = True
    """Tensors of one dimension or none (biases, norms) that no rule matches travel as they are, in buckets of their own, as
    in CGX: they are few bytes, and errors in them cost most."""
    schedule: ScheduleField = Backward()
    """A schedule or its bare word."""
    scheme: str | None = None
    """How all buckets travel; None is what each spec names first in its `schemes`. The name of a
    collective (`gradwire options --collectives` lists them); a system's name, as "CGX between nodes"; or any option of
    docs/options.md by its tasks, with spaces between. What is not compressed takes the same links as it is."""
    bucket_bytes: int | None = None
    """A bucket closes with the tensor that brings it to so many bytes of gradient. Larger: fewer launches, later ones.
    None: 1 MiB for each rank, 2 to 8 MiB, since a rank sends a bucket in as many messages as there are ranks and each has
    a price. Plain values; the planner's search replaces them."""
    edge_bytes: int = 256 * 1024
    """At both ends of backward buckets are smaller, down to so many bytes: the first so that the link starts early, the
    last since nothing hides its exchange. In between a bucket closes when it holds as much as was closed before it or is
    still to come, whichever is less, at the latest at `bucket_bytes`. `bucket_bytes` or more: all buckets alike."""
    chunk_bytes: int = 8 * 2**20
    """A bucket above so many bytes is exchanged in chunks of that size; 0 never cuts. Smaller: more overlap of codec
    and link, more launches. A plain value too. All-reduce is not cut: the collective does it inside."""
    residual_dtype: str = "float32"
    """How the residuals of specs with error feedback are stored: float32, bfloat16 or int8 (a byte an element and a bfloat16
    scale for each 128). Narrower: less memory, more error and more codec time. See `Bucket.residual_dtype`."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "default", as_spec("default", self.default))
        freeze(self, "rules")
        msgspec.structs.force_setattr(self, "rules", tuple(as_rule(i, rule) for i, rule in enumerate(self.rules)))
        msgspec.structs.force_setattr(self, "schedule", as_schedule(self.schedule))
        if self.scheme is not None:
            check_scheme(self.scheme)
        if self.bucket_bytes is not None:
            whole("bucket_bytes", self.bucket_bytes, "bytes of gradient at which a bucket closes", low=1)
        whole("edge_bytes", self.edge_bytes, "bytes of gradient that close a bucket at an end of backward", low=1)
        whole("chunk_bytes", self.chunk_bytes, "bytes of gradient per chunk, 0 for never cut")
        word("residual_dtype", self.residual_dtype, RESIDUAL_DTYPES)

    def __repr__(self) -> str:
        return f"Policy({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"

    def plan(self, tensors: Sequence[TensorInfo], ranks: int = 2) -> Plan:
        """The plan for so many ranks and for tensors in gradient-ready order, first ready first.

        Classes are tensors of one dtype, device and family of spec; within each, consecutive tensors are fused. The
        launch order is the order in which buckets become ready, both link tasks of a bucket one after the other. In the
        pipelined schedule all reduce phases come first, then the gather phases in the reverse order, in which forward needs
        them; an indivisible option has no gather phase.

        Raises PlanError if a rule matches nothing, or if the scheme cannot carry a spec.
        """
        if not tensors:
            raise PlanError("there are 0 tensors to plan for: no parameter is trainable. Set requires_grad on some.")
        unique("tensors", [tensor.name for tensor in tensors], ".name", error=PlanError)
        specs = self._assign(tensors)
        buckets = tuple(self._bucket(members, specs) for members in self._fuse(tensors, specs, ranks))
        schedule = as_schedule(self.schedule)
        launch = launch_of(buckets, schedule)
        return Plan(fingerprint=fingerprint(tensors), schedule=schedule, buckets=buckets, launch=launch)

    def _assign(self, tensors: Sequence[TensorInfo]) -> dict[str, Spec]:
        specs: dict[str, Spec] = {}
        by_name = {tensor.name: [tensor] for tensor in tensors}
        for which, spec in self.rules:
            where = which if isinstance(which, Where) else Where(which)
            # a name that is no pattern is looked up: there may be a rule for each tensor
            candidates = tensors if _PATTERN.intersection(where.names) else by_name.get(where.names, [])
            matched = [tensor.name for tensor in candidates if where.matches(tensor)]
            fresh = [name for name in matched if name not in specs]
            if not fresh:
                raise PlanError(useless(which, spec, matched, tensors))
            specs.update(dict.fromkeys(fresh, spec))
        exempt = [tensor.name for tensor in tensors if self.exempt_vectors and len(tensor.shape) < 2]
        specs = dict.fromkeys(exempt, _EXEMPT) | specs
        return {tensor.name: specs.get(tensor.name, self.default) for tensor in tensors}

    def _fuse(self, tensors: Sequence[TensorInfo], specs: dict[str, Spec], ranks: int) -> list[list[TensorInfo]]:
        """Buckets in the order in which they become ready (each closes with the tensor that fills it; smaller at both ends).

        What is exempt among compressed tensors is little: two buckets at most but for `bucket_bytes`, the second small, since
        nothing hides the last exchange.
        """
        full = self.bucket_bytes or min(max(2, ranks), 8) * 2**20
        filling: dict[tuple[str, str, str], list[tuple[int, TensorInfo]]] = {}
        filled: dict[tuple[str, str, str], int] = {}
        exempt = sum(tensor.nbytes for tensor in tensors if specs[tensor.name] is _EXEMPT)
        exempt_to_come = exempt
        closed: list[list[tuple[int, TensorInfo]]] = []
        sent, to_come = 0, sum(tensor.nbytes for tensor in tensors)
        for position, tensor in enumerate(tensors):
            to_come -= tensor.nbytes
            key = (tensor.dtype, tensor.device, specs[tensor.name].family)
            filling.setdefault(key, []).append((position, tensor))
            filled[key] = filled.get(key, 0) + tensor.nbytes
            least = max(min(sent, to_come), self.edge_bytes)
            if specs[tensor.name] is _EXEMPT and 0 < exempt < sent + to_come:
                exempt_to_come -= tensor.nbytes
                least = filled[key] if 0 < exempt_to_come <= exempt // 8 < filled[key] else full
            if filled[key] >= min(full, least):
                sent += filled[key]
                closed.append(filling.pop(key))
                filled.pop(key)
        closed.extend(filling.values())
        closed.sort(key=lambda bucket: bucket[-1][0])
        return [[tensor for _, tensor in bucket] for bucket in closed]

    def _bucket(self, members: Sequence[TensorInfo], specs: dict[str, Spec]) -> Bucket:
        own = {tensor.name: specs[tensor.name] for tensor in members}
        first = members[0]
        plain = not own[first.name].encodes
        possible = own[first.name].schemes
        divisible = as_schedule(self.schedule).gathers_in_forward and "alltoall" in possible
        scheme = self.scheme or ("alltoall" if divisible else possible[0])
        named = collective(scheme)
        if named is not None and own[first.name].encodes and not named.carries(own[first.name]):
            raise PlanError(
                f"scheme is {scheme!r}, but tensor {first.name!r} has spec {own[first.name]!r}, which that scheme cannot carry. "
                f"Use scheme={' or '.join(map(repr, possible))}, or leave it out."
            )
        nbytes = sum(tensor.nbytes for tensor in members)
        option = tasks_of(scheme, first.device, own[first.name])
        on_wire = {task for task in option if not task.startswith(("comp:", "decomp:"))} == {*ALL_REDUCE}
        cut = not on_wire and nbytes > self.chunk_bytes
        # An identity sum must not lose bits, so float64 stays; everything else adds in float32.
        wide = plain and (on_wire or first.dtype == "float64")
        return Bucket(
            tensors=tuple(own),
            spec=own if len(set(own.values())) > 1 else own[first.name],
            reduce_dtype=first.dtype if wide else "float32",
            residual_dtype=self.residual_dtype if own[first.name].feedback else "float32",
            option=option,
            chunk_bytes=self.chunk_bytes if cut else 0,
            numel=sum(tensor.numel for tensor in members),
        )


def launch_of(buckets: Sequence[Bucket], schedule: Schedule) -> tuple[tuple[int, str], ...]:
    """The launch order of buckets that become ready in this order; see `Policy.plan`."""
    if not schedule.gathers_in_forward:
        return tuple((index, task) for index, bucket in enumerate(buckets) for task in bucket.link_tasks)
    reduces: list[tuple[int, str]] = []
    gathers: list[tuple[int, str]] = []
    for index, bucket in enumerate(buckets):
        border = len(bucket.link_tasks) - bucket.gathers
        reduces += [(index, task) for task in bucket.link_tasks[:border]]
        gathers = [*((index, task) for task in bucket.link_tasks[border:]), *gathers]
    return (*reduces, *gathers)


def Uniform(
    spec: Spec,
    schedule: Schedule | str = "backward",
    scheme: str | None = None,
    bucket_bytes: int | None = None,
    edge_bytes: int = 256 * 1024,
    chunk_bytes: int = 8 * 2**20,
    residual_dtype: str = "float32",
) -> Policy:
    """The policy without rules: one spec for every tensor, 1-D too. Fields as in `Policy`.

    >>> Uniform(Identity())
    Policy(default=Identity(), exempt_vectors=False)
    """
    return Policy(
        default=spec,
        exempt_vectors=False,
        schedule=schedule,
        scheme=scheme,
        bucket_bytes=bucket_bytes,
        edge_bytes=edge_bytes,
        chunk_bytes=chunk_bytes,
        residual_dtype=residual_dtype,
    )
