"""Policies: rules by tensor name, from which a plan follows without measurement.

>>> from gradwire.core import QSGD, Identity, TensorInfo
>>> policy = Policy(default=QSGD(bits=4), rules=[("*.bias", Identity())])
>>> plan = policy.plan([TensorInfo("fc.bias", (10,), "float32"), TensorInfo("fc.weight", (10, 64), "float32")])
>>> [(bucket.tensors, bucket.option) for bucket in plan.buckets][0]
(('fc.bias', 'fc.weight'), ('comp:cpu', 'alltoall:inter', 'decomp:cpu', 'comp:cpu', 'allgather:inter', 'decomp:cpu'))
>>> plan.launch
((0, 'alltoall'), (0, 'allgather'))
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from gradwire.core import (
    ALL_REDUCE,
    COLLECTIVES,
    DTYPE_BYTES,
    QSGD,
    RESIDUAL_DTYPES,
    Backward,
    Bucket,
    Document,
    Identity,
    Plan,
    Schedule,
    Spec,
    TensorInfo,
    as_schedule,
    as_spec,
    changed,
    collective,
    columns_of,
    convert,
    fingerprint,
    flags,
    freeze,
    show,
    text,
    uncompressed,
    under,
    unique,
    whole,
    wholes,
    word,
)
from gradwire.errors import FormatError, PlanError
from gradwire.plan.schemes import FLAT, HIERARCHICAL, LEADERS, between_nodes, carries, check_scheme, tasks_of

if TYPE_CHECKING:
    SpecField: TypeAlias = Spec
    RulesField: TypeAlias = Sequence[tuple["str | Where", Spec]]
    ScheduleField: TypeAlias = Schedule | str
else:
    SpecField = RulesField = ScheduleField = Any  # brought to one form by __post_init__


_EDGE_BYTES = 256 * 2**10
_GPU_BUCKET_BYTES, _GPU_EDGE_BYTES, _GPU_CHUNK_BYTES = 32 * 2**20, 4 * 2**20, 48 * 2**20
_EXEMPT = Identity()
EMBEDDINGS = QSGD(bits=4)
"""For embeddings that the default cannot send: zeros stay zeros."""
_FEW_RANKS = 4
"""Most ranks with which vectors travel in payloads of an all-gather, which sends every payload to each other rank. With more
ranks vectors have all-reduces of their own."""
_MOST_DIRECT = 16
"""Most ranks that exchange payloads directly by default. With more ranks a chunk of 8 MiB at 4 bits has messages below 64 KB."""
_MOST_UNEVEN_DIRECT = 128
"""Most ranks that exchange payloads directly by default where their number is prime. A grid with a shorter last row encodes once
more, and its phases are a few percent longer."""
_BYTES_FOR_EACH_RANK, _CHUNK_BYTES = 2**20, 8 * 2**20
_LEAST_LARGE_BUCKETS = 8
"""A model has at least so many buckets, before buckets get larger than `_CHUNK_BYTES`."""
_MOST_CARRIED = 2**20
"""Most bytes of a vector that travels in a payload. All-reduce sums larger vectors without copying them."""
_PATTERN = frozenset("*?[|")
"""The characters that make a name a pattern; see `Where.names`."""


class Where(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Conditions on a tensor's name, size, number of dimensions and dtype. A tensor must fulfil all given ones.

    >>> Where("*embed*|*head*", min_numel=10_000).matches(TensorInfo("embed.weight", (1000, 64), "float32"))
    True
    """

    names: str = "*"
    """Patterns of whole tensor names as in fnmatch, case-sensitive, with | between alternatives. A name matches itself, also one
    with brackets."""
    min_numel: int = 0
    """Least number of elements."""
    max_numel: int | None = None
    """Largest number of elements; None: no limit."""
    min_dims: int = 0
    """Least number of dimensions."""
    max_dims: int | None = None
    """Largest number of dimensions, such as 1 for biases and norms; None: no limit."""
    dtype: str | None = None
    """A dtype such as 'float32' or 'bfloat16'; None: any."""

    def __post_init__(self) -> None:
        text("names", self.names, "a pattern of tensor names")
        wholes(self, "elements", "min_numel", "max_numel")
        wholes(self, "dimensions", "min_dims", "max_dims")
        if self.dtype is not None:
            word("dtype", self.dtype, tuple(DTYPE_BYTES))

    def matches(self, tensor: TensorInfo) -> bool:
        """Whether the tensor fulfils all conditions."""
        named = tensor.name == self.names or any(
            tensor.name == pattern or fnmatchcase(tensor.name, pattern) for pattern in self.names.split("|")
        )
        return (
            named
            and self.min_numel <= tensor.numel
            and (self.max_numel is None or tensor.numel <= self.max_numel)
            and self.min_dims <= len(tensor.shape)
            and (self.max_dims is None or len(tensor.shape) <= self.max_dims)
            and self.dtype in (None, tensor.dtype)
        )

    def __repr__(self) -> str:
        return f"Where({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"


def as_rule(index: int, rule: Any) -> tuple[str | Where, Spec]:
    """(pattern or Where, spec) of a rule that comes from a user or a JSON file."""
    if not isinstance(rule, (tuple, list)) or len(rule) != 2:
        raise FormatError(f"rules[{index}] is {show(rule)}: it must be a pair of pattern and spec.")
    which, field = rule[0], f"rules[{index}][0]"
    if isinstance(which, Mapping):
        with under(field):
            which = convert(dict(which), Where)
    elif not isinstance(which, Where):
        text(field, which, "a pattern of tensor names or a Where")
    return which, as_spec(f"rules[{index}][1]", rule[1])


def useless(which: str | Where, spec: Spec, matched: Sequence[str], tensors: Sequence[TensorInfo]) -> str:
    """The message about a rule without effect; `matched` are the tensors that the rule matches."""
    rule = f"rule ({which!r}, {spec!r})"
    if matched:
        return f"{rule} has no effect: earlier rules take all {len(matched)} tensors that it matches. Put it before them."
    names = [tensor.name for tensor in tensors]
    pattern = which if isinstance(which, str) else which.names
    close = get_close_matches(pattern.replace("*", ""), names, n=3, cutoff=0.3) or names[:3]
    return f"{rule} matches none of the {len(names)} tensors. Nearest names: {', '.join(close)}. Correct or remove it."


class _Default(Document, frozen=True):
    """The field of a policy that may be given without its name."""

    default: SpecField
    """Spec of the tensors that no rule matches. Where it has no code for zero (`Spec.keeps_zeros`), QSGD with 4 bits sends
    embeddings, so that rows which no batch uses stay as they are."""


class Policy(_Default, frozen=True, kw_only=True):
    """Rules that give each tensor its spec, and the settings of buckets. The first rule that matches a tensor's name counts."""

    what: ClassVar[str] = "policy"
    remedy: ClassVar[str] = "Write it from the fields of gradwire.Policy."
    omit_at_default: ClassVar[tuple[str, ...]] = (
        *("rules", "exempt_vectors", "scheme", "bucket_bytes", "edge_bytes", "chunk_bytes", "residual_dtype"),
    )

    rules: RulesField = ()
    """(which, spec) pairs; the first match wins. `which` is a case-sensitive fnmatch pattern of whole tensor names, with |
    between alternatives ("*.bias|*norm*"). Or `which` is a `Where`, which also compares sizes, dimensions and dtypes."""
    exempt_vectors: bool = True
    """Whether vectors and scalars (biases, norms) that no rule matches stay uncompressed, as in CGX. They are few bytes, and
    errors in them cost most. They travel in the payloads of compressed tensors, or in buckets of their own if the payloads have
    no room for uncompressed tensors (`Spec.carries_uncompressed`)."""
    schedule: ScheduleField = Backward()
    """A schedule, or the name of one."""
    scheme: str | None = None
    """The scheme of all buckets. "flat": all ranks exchange by the first of each spec's `schemes`. "hierarchical": gradients are
    added uncompressed inside each node, and nodes exchange the compressed sums by the first of each spec's `schemes`; specs that
    cannot encode a sum travel flat. "leaders": the same, and one rank of each node exchanges for the node, another one for each
    bucket. None: "hierarchical" if there are several nodes with the same number of ranks, at least two; "leaders" if they have
    different numbers; otherwise "grid" for more than 16 ranks (more than 128 if their number is prime), if all specs that encode
    travel by "alltoall"; else "flat". Other values: the name of a collective (`gradwire options --collectives` lists them), the
    name of a system such as "CGX between nodes", or the tasks of an option of docs/options.md with spaces between. Uncompressed
    buckets use the same links."""
    bucket_bytes: int | None = None
    """A bucket closes with the tensor that brings the bucket to this number of bytes of gradient. Larger: fewer, later launches.
    None: 1 MiB for each rank, at least 2 MiB, since a rank sends a bucket as one message to each rank, and each message has a
    price; at most 8 MiB, or an eighth of the model if that is more. On GPUs at least 32 MiB, since each bucket takes several
    launches. These are plain guesses; the planner's search finds better ones."""
    edge_bytes: int | None = None
    """The size of the smallest buckets, at both ends of backward; None: 256 KiB, on GPUs 4 MiB. The first is small so that the
    link starts early, the last one because nothing hides its exchange. In between a bucket closes when it holds as many bytes as
    all earlier buckets or as all later tensors, whichever is less, and at `bucket_bytes` at the latest. `bucket_bytes` or more:
    all alike."""
    chunk_bytes: int | None = None
    """A larger bucket is exchanged in chunks of this number of bytes; 0 never cuts. Smaller: codecs and links overlap more, and
    there are more and shorter messages. None: 8 MiB, on GPUs 48 MiB, or as much as buckets hold if `bucket_bytes` is None too. A
    plain guess too. All-reduce is not cut: the collective cuts inside."""
    residual_dtype: str = "float32"
    """dtype of the stored residuals of specs with error feedback: float32, bfloat16 or int8 (a byte an element and a bfloat16
    scale for each 128). Narrower: less memory, more error and more codec time. See `Bucket.residual_dtype`."""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "default", as_spec("default", self.default))
        freeze(self, "rules")
        msgspec.structs.force_setattr(self, "rules", tuple(as_rule(i, rule) for i, rule in enumerate(self.rules)))
        msgspec.structs.force_setattr(self, "schedule", as_schedule(self.schedule))
        flags(self, "exempt_vectors")
        if self.scheme is not None:
            check_scheme(self.scheme)
        wholes(self, "bytes of gradient at which a bucket closes", "bucket_bytes", low=1)
        wholes(self, "bytes of gradient that close a bucket at an end of backward", "edge_bytes", low=1)
        wholes(self, "bytes of gradient per chunk, 0 for never cut", "chunk_bytes")
        word("residual_dtype", self.residual_dtype, RESIDUAL_DTYPES)

    def __repr__(self) -> str:
        return f"Policy({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"

    def plan(self, tensors: Sequence[TensorInfo], ranks: int = 2, ranks_per_node: int | None = 1) -> Plan:
        """The plan for `ranks` ranks and for tensors in gradient-ready order, first ready first. ranks_per_node: None if nodes
        have different numbers of ranks.

        A class is all tensors of one dtype, device and family of spec. Consecutive tensors of a class are fused. Vectors that are
        not compressed travel in the payloads of other tensors (docs/decisions/029-vectors-in-payloads.md).

        The launch order is the order in which buckets become ready, both link tasks of a bucket one after the other. In the
        pipelined schedule all reduce phases come first, then the gather phases in the reverse order, in which forward needs
        them; an indivisible option has no gather phase.

        Raises PlanError if a rule matches nothing, if the scheme cannot carry a spec, or if a number of ranks is no whole number.
        """
        whole("ranks", ranks, "the number of ranks that train", low=1, error=PlanError)
        if ranks_per_node is not None:
            whole("ranks_per_node", ranks_per_node, "the ranks of each node", low=1, error=PlanError)
        if not tensors:
            raise PlanError("there are 0 tensors to plan for: no parameter is trainable. Set requires_grad on some.")
        unique("tensors", [tensor.name for tensor in tensors], ".name", error=PlanError)
        schedule = as_schedule(self.schedule)
        if None in (self.scheme, self.bucket_bytes, self.edge_bytes, self.chunk_bytes):
            return self._filled_in(tensors, ranks, ranks_per_node).plan(tensors, ranks)
        specs = self._assign(tensors)
        buckets = tuple(self._bucket(members, specs) for members in self._fuse(tensors, specs, ranks))
        launch = launch_of(buckets, schedule)
        return Plan(fingerprint=fingerprint(tensors), schedule=schedule, buckets=buckets, launch=launch)

    def _filled_in(self, tensors: Sequence[TensorInfo], ranks: int, ranks_per_node: int | None) -> "Policy":
        """The policy with values for None."""
        scheme, bucket_bytes, edge_bytes, chunk_bytes = self.scheme, self.bucket_bytes, self.edge_bytes, self.chunk_bytes
        on_gpu = tensors[0].device == "gpu"
        if scheme is None:
            flat = as_schedule(self.schedule).shards_optimizer or ranks_per_node in (1, ranks)  # one shard for each rank
            by_node = LEADERS if ranks_per_node is None else HIERARCHICAL
            scheme = self._flat_scheme(ranks) if flat else by_node
        if chunk_bytes is None:
            chunk_bytes = _GPU_CHUNK_BYTES if on_gpu else _CHUNK_BYTES
        if bucket_bytes is None:
            most = max(_CHUNK_BYTES, sum(tensor.nbytes for tensor in tensors) // _LEAST_LARGE_BUCKETS)
            bucket_bytes = max(_GPU_BUCKET_BYTES if on_gpu else 0, min(max(2, ranks) * _BYTES_FOR_EACH_RANK, most))
            chunk_bytes = chunk_bytes if self.chunk_bytes is not None else max(chunk_bytes, bucket_bytes)
        if edge_bytes is None:
            edge_bytes = _GPU_EDGE_BYTES if on_gpu else _EDGE_BYTES
        filled = {"scheme": scheme, "bucket_bytes": bucket_bytes, "edge_bytes": edge_bytes, "chunk_bytes": chunk_bytes}
        return msgspec.structs.replace(self, **filled)

    def _flat_scheme(self, ranks: int) -> str:
        """The grid for many ranks, if all specs that encode can travel by it as by all-to-all."""
        many = ranks > (_MOST_DIRECT if columns_of(ranks) < ranks else _MOST_UNEVEN_DIRECT)
        grid = COLLECTIVES["grid"]
        specs = [self.default, *(spec for _, spec in self.rules), getattr(as_schedule(self.schedule), "correction", None)]
        encoding = [spec for spec in specs if spec is not None and spec.encodes]
        fits = all(spec.schemes[0] == "alltoall" and grid.carries(spec) for spec in encoding)
        return grid.name if encoding and fits and many else FLAT

    def _assign(self, tensors: Sequence[TensorInfo]) -> dict[str, Spec]:
        specs: dict[str, Spec] = {}
        by_name = {tensor.name: [tensor] for tensor in tensors}
        for which, spec in self.rules:
            where = which if isinstance(which, Where) else Where(which)
            # a name that is no pattern is looked up in a table, since there may be a rule for each tensor
            candidates = tensors if _PATTERN.intersection(where.names) else by_name.get(where.names, [])
            matched = [tensor.name for tensor in candidates if where.matches(tensor)]
            fresh = [name for name in matched if name not in specs]
            if not fresh:
                raise PlanError(useless(which, spec, matched, tensors))
            specs.update(dict.fromkeys(fresh, spec))
        exempt = [tensor.name for tensor in tensors if self.exempt_vectors and len(tensor.shape) < 2]
        specs = dict.fromkeys(exempt, _EXEMPT) | specs
        if not self.default.keeps_zeros:
            specs = dict.fromkeys((tensor.name for tensor in tensors if tensor.embedding), EMBEDDINGS) | specs
        return {tensor.name: specs.get(tensor.name, self.default) for tensor in tensors}

    def _fuse(self, tensors: Sequence[TensorInfo], specs: dict[str, Spec], ranks: int) -> list[list[TensorInfo]]:
        """Buckets in the order in which they become ready. The tensor that fills one closes it. Those at both ends are small.

        A vector that is not compressed joins the next bucket of compressed tensors that becomes ready, or the last bucket of all,
        so that no bucket becomes ready later. If no bucket can carry vectors, exempt tensors get at most two buckets, unless
        `bucket_bytes` demands more. The second one is small, since nothing hides the last exchange.
        """
        place = {tensor.name: position for position, tensor in enumerate(tensors)}
        carrying = {spec: self._may_carry(spec, ranks) for spec in {*specs.values()}}
        classes = {(tensor.dtype, tensor.device) for tensor in tensors if carrying[specs[tensor.name]]}
        carried = [
            tensor
            for tensor in tensors
            if len(tensor.shape) < 2
            and (tensor.device != "gpu" or ranks > _MOST_DIRECT)  # on a GPU each vector in a payload takes launches
            and not specs[tensor.name].encodes
            and tensor.nbytes <= _MOST_CARRIED
            and (tensor.dtype, tensor.device) in classes
        ]
        names = {tensor.name for tensor in carried}
        closed = self._close([tensor for tensor in tensors if tensor.name not in names], specs)
        carriers: dict[tuple[str, str], list[tuple[int, list[TensorInfo]]]] = defaultdict(list)
        last = place[closed[-1][-1].name]
        for bucket in closed:
            if any(carrying[specs[tensor.name]] for tensor in bucket):
                carriers[bucket[0].dtype, bucket[0].device].append((place[bucket[-1].name], bucket))
        left = []
        for tensor in carried:
            own = carriers[tensor.dtype, tensor.device]
            after = bisect_right(own, place[tensor.name], key=itemgetter(0))
            if after < len(own) or own[-1][0] == last:
                own[min(after, len(own) - 1)][1].append(tensor)
            else:
                left.append(tensor)
        if left:
            closed += self._close(left, specs)
        for bucket in closed:
            bucket.sort(key=lambda tensor: place[tensor.name])
        return sorted(closed, key=lambda bucket: place[bucket[-1].name])

    def _may_carry(self, spec: Spec, ranks: int) -> bool:
        """Whether payloads of this spec carry uncompressed vectors."""
        correction = getattr(as_schedule(self.schedule), "correction", None)
        if not spec.carries_uncompressed or not (correction is None or correction.carries_uncompressed):
            return False
        links = [task for task in self._option("cpu", spec) if not task.startswith(("comp:", "decomp:"))]
        return ranks <= _FEW_RANKS or any(not task.startswith("allgather:") for task in links)

    def _scheme(self, spec: Spec) -> str:
        divisible = as_schedule(self.schedule).gathers_in_forward and "alltoall" in spec.schemes
        own = "alltoall" if divisible else spec.schemes[0]
        return own if self.scheme in (None, FLAT, HIERARCHICAL, LEADERS) else self.scheme

    def _option(self, device: str, spec: Spec) -> tuple[str, ...]:
        flat = tasks_of(self._scheme(spec), device, spec)
        if self.scheme not in (HIERARCHICAL, LEADERS):
            return flat
        nested = between_nodes(flat, leaders=self.scheme == LEADERS)
        if not spec.encodes:
            return uncompressed(nested)
        return nested if carries(nested, spec, device) else flat

    def _close(self, tensors: Sequence[TensorInfo], specs: dict[str, Spec]) -> list[list[TensorInfo]]:
        """Fill and close buckets of one class each."""
        assert self.bucket_bytes is not None and self.edge_bytes is not None
        full, edge = self.bucket_bytes, self.edge_bytes
        if (fewest := as_schedule(self.schedule).fewest_buckets) > 1:
            # a bucket closes late, and few buckets are dealt out unevenly
            full = min(full, max(1, sum(tensor.nbytes for tensor in tensors) // (4 * fewest)))
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
            least = max(min(sent, to_come), edge)
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
        first = next((tensor for tensor in members if own[tensor.name].encodes), members[0])
        spec = own[first.name]
        scheme, named = self._scheme(spec), collective(self._scheme(spec))
        if named is not None and spec.encodes and not named.carries(spec):
            raise PlanError(
                f"scheme is {scheme!r}, but tensor {first.name!r} has spec {spec!r}, which that scheme cannot carry. "
                f"Use scheme={' or '.join(map(repr, spec.schemes))}, or leave it out."
            )
        option = self._option(first.device, spec)
        on_wire = {task for task in option if not task.startswith(("comp:", "decomp:"))} == {*ALL_REDUCE}
        chunk_bytes = self.chunk_bytes or 0
        cut = not on_wire and sum(tensor.nbytes for tensor in members) > chunk_bytes
        # An identity sum must not lose bits, so float64 stays; everything else adds in float32.
        wide = not spec.encodes and (on_wire or first.dtype == "float64")
        return Bucket(
            tensors=tuple(own),
            spec=own if len(set(own.values())) > 1 else spec,
            reduce_dtype=first.dtype if wide else "float32",
            residual_dtype=self.residual_dtype if spec.feedback else "float32",
            option=option,
            chunk_bytes=chunk_bytes if cut else 0,
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
    edge_bytes: int | None = None,
    chunk_bytes: int | None = None,
    residual_dtype: str = "float32",
) -> Policy:
    """The policy without rules: one spec for every tensor, vectors included. Fields as in `Policy`.

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
