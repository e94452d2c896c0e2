"""The plan: gradwire executes, simulates, saves and reports plans."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from gradwire.core.checks import (
    DTYPE_BYTES,
    each,
    freeze,
    freeze_pairs,
    near,
    numbers,
    only_version,
    show,
    text,
    under,
    unique,
    whole,
    wholes,
    word,
)
from gradwire.core.collectives import (
    CODEC_TASKS,
    LINKS,
    ROUTINES,
    collective_of,
    gathers_of,
    is_link_word,
    link_words,
    words_on_links,
)
from gradwire.core.payload import RAW
from gradwire.core.schedules import Backward, Schedule, as_schedule
from gradwire.core.specs import Spec, as_spec
from gradwire.core.strict import Document
from gradwire.core.sums import rows_of
from gradwire.core.tensors import TensorInfo, fingerprint
from gradwire.errors import FormatError, PlanError

RESIDUAL_DTYPES = ("float32", "bfloat16", "int8")
"""The dtypes that residuals may be stored in."""

_DIRECT = ("alltoall:inter", "allgather:inter")
"""The link tasks of direct exchanges."""

_CURE = "A plan belongs to one model: make it again for this one, as gradwire.Policy.plan(tensors) does, or pass a policy."

if TYPE_CHECKING:
    BucketSpec = Spec | Mapping[str, Spec]
    ScheduleField = Schedule
else:
    BucketSpec = ScheduleField = Any  # read by __post_init__: specs through the registry, schedules by kind


class Bucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tensors that are encoded and exchanged together."""

    omit_at_default: ClassVar[tuple[str, ...]] = ("chunk_bytes", "numel")

    tensors: tuple[str, ...]
    """Names in gradient-ready order, which is their order in the flat buffer."""
    spec: BucketSpec
    """One spec, or one for each tensor by name, all of one family. Tensors with Identity() may be among tensors of a spec with
    `carries_uncompressed`: they travel uncompressed in the same payload."""
    reduce_dtype: str = "float32"
    """dtype of the sum over ranks. Narrower: fewer bytes and more error where the sum is on the wire."""
    residual_dtype: str = "float32"
    """dtype of the stored residuals of error feedback: float32, bfloat16 or int8 (a byte an element, a bfloat16 scale for each
    128). Narrower: less memory, more error. Encodes still use float32. int8 is rounded at random so that the mean is right.
    Momentum and PowerSGD's factors stay float32."""
    option: tuple[str, ...]
    """Tasks in order, as `task:where`: comp and decomp on gpu or cpu, the collectives on intra or inter."""
    chunk_bytes: int = 0
    """Bytes of raw gradient in each chunk of the exchange; 0: one chunk. Smaller: more overlap, more launches."""
    numel: int = 0
    """Elements of the bucket, for messages and checks; 0 is not recorded."""

    def __post_init__(self) -> None:
        freeze(self, "tensors", "option")
        if not self.tensors:
            raise FormatError("tensors is []: a bucket has at least one tensor. Leave the bucket out.")
        for index, name in enumerate(self.tensors):
            text(f"tensors[{index}]", name, "a tensor's name")
        msgspec.structs.force_setattr(self, "spec", _as_bucket_spec(self.spec, self.tensors))
        word("reduce_dtype", self.reduce_dtype, tuple(DTYPE_BYTES))
        word("residual_dtype", self.residual_dtype, (*DTYPE_BYTES, "int8"))
        for index, task in enumerate(self.option):
            _check_task(f"option[{index}]", task)
        if not self.link_tasks:
            raise FormatError(f"option is {show(list(self.option))}: without a link task nothing is exchanged. Add one.")
        _check_words(self)
        whole("chunk_bytes", self.chunk_bytes, "bytes of raw gradient per chunk, 0 for not cut")
        whole("numel", self.numel, "the elements of the bucket, 0 for not recorded")

    @property
    def link_tasks(self) -> tuple[str, ...]:
        """The words of the option's link tasks, in its order, such as ('alltoall', 'allgather')."""
        return words_on_links(self.option)

    @property
    def gathers(self) -> int:
        """The number of link tasks of the gather phase, which are the last ones. 0: the option is indivisible."""
        return gathers_of(self.option)

    @property
    def is_direct(self) -> bool:
        """Whether each rank gets its shard from each other rank and sends them its sum. Only such buckets have `Plan.shares`."""
        return {task for task in self.option if task.partition(":")[2] in LINKS} == {*_DIRECT}

    def spec_of(self, tensor: str) -> Spec:
        """The spec of one of the bucket's tensors."""
        return self.spec if isinstance(self.spec, Spec) else self.spec[tensor]

    @property
    def main_spec(self) -> Spec:
        """The spec of the first tensor that is compressed; Identity if none is. Specs of one bucket are of its family."""
        if isinstance(self.spec, Spec):
            return self.spec
        return next((spec for spec in self.spec.values() if spec.encodes), self.spec[self.tensors[0]])

    def specs_with(self, spec: Spec) -> Spec | dict[str, Spec]:
        """The bucket's specs with `spec` for the compressed tensors; for all tensors if `spec` cannot carry uncompressed ones."""
        if isinstance(self.spec, Spec) or not spec.carries_uncompressed:
            return spec
        return {name: spec if own.encodes else own for name, own in self.spec.items()}

    def bits_of(self, tensor: str, step: int | None = None) -> int:
        """`ElementRun.bits` of one of the bucket's tensors, in a step or after any warm-up."""
        spec = self.spec_of(tensor) if step is None else self.spec_of(tensor).at_step(step)
        return spec.element_bits if spec.encodes or not self.main_spec.encodes else RAW

    @property
    def compressed(self) -> tuple[str, ...]:
        """The tensors that are compressed."""
        return tuple(name for name in self.tensors if self.spec_of(name).encodes)

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The spec of each tensor, in the order of `tensors`."""
        return tuple(self.spec_of(tensor) for tensor in self.tensors)


class Prediction(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The predicted step time, the step time of plain all-reduce, and a lower bound for all plans."""

    step_us: float
    baseline_step_us: float
    lower_bound_us: float
    bytes_per_rank: int
    """Bytes that one rank sends in a step."""
    extra_bytes_device: int
    """Memory beyond plain training on the gradients' device: buffers, payloads, residuals."""
    extra_bytes_host: int

    def __post_init__(self) -> None:
        numbers(self, "a time in microseconds", "step_us", "baseline_step_us", "lower_bound_us")
        wholes(self, "a number of bytes", "bytes_per_rank", "extra_bytes_device", "extra_bytes_host")


class Plan(Document, frozen=True, kw_only=True, dict=True):
    """Buckets, the option and spec of each, the launch order and the schedule.

    Raises FormatError (SpecError for a wrong spec) that begins with the path of the wrong field.
    """

    what: ClassVar[str] = "plan"
    remedy: ClassVar[str] = "Save it again from `handle.plan`, or pass a policy instead."
    omit_at_default: ClassVar[tuple[str, ...]] = ("shares", "prediction")

    version: int = 1
    fingerprint: str
    """Hash of the model's trainable tensors: `fingerprint(tensors)`."""
    schedule: ScheduleField = Backward()
    buckets: tuple[Bucket, ...]
    launch: tuple[tuple[int, str], ...]
    """All link tasks of a step as (bucket index, word). Every rank launches them in this order."""
    shares: tuple[int, ...] = ()
    """The sizes of the shards of all ranks in direct exchanges (`Bucket.is_direct`), as parts in any unit. A rank with a smaller
    part sends fewer bytes. Empty: shards are equal."""
    prediction: Prediction | None = None

    def __post_init__(self) -> None:
        only_version(self.version)
        text("fingerprint", self.fingerprint, "the fingerprint of the model")
        msgspec.structs.force_setattr(self, "schedule", as_schedule(self.schedule))
        if self.schedule.undecided:
            raise FormatError(f"schedule is {self.schedule!r}: {self.schedule.undecided}")
        freeze(self, "buckets")
        each("buckets", self.buckets, Bucket)
        freeze_pairs(self, "launch", "[bucket index, link task]")
        freeze(self, "shares")
        for rank, part in enumerate(self.shares):
            whole(f"shares[{rank}]", part, "the part of this rank's shard, 0 for no shard")
        if self.shares and not sum(self.shares):
            raise FormatError(
                f"shares is {show(list(self.shares))}: one rank at least has a shard. Leave it out for equal shards."
            )
        if self.prediction is not None and not isinstance(self.prediction, Prediction):
            raise FormatError(f"prediction is {show(self.prediction)}: it must be a Prediction or None.")
        _check_tensors(self.buckets)
        _check_launch(self.launch, self.buckets)

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors, bucket by bucket."""
        return tuple(name for bucket in self.buckets for name in bucket.tensors)

    @property
    def gate(self) -> int:
        """The position in `launch` of the first task that runs during the next forward. All tasks from there on are gather
        phases. Schedules that do not gather in forward have the gate at the end."""
        position = len(self.launch)
        if not self.schedule.gathers_in_forward:
            return position
        left = [bucket.gathers for bucket in self.buckets]
        while position and left[self.launch[position - 1][0]]:
            position -= 1
            left[self.launch[position][0]] -= 1
        return position

    @cached_property
    def specs(self) -> tuple[Spec, ...]:
        """The different specs of all tensors."""
        return tuple(dict.fromkeys(spec for bucket in self.buckets for spec in bucket.specs))

    @property
    def shards_optimizer(self) -> bool:
        """Whether each rank updates only its shard of every bucket, and gather phases send parameters."""
        return self.schedule.shards_optimizer

    def digest(self) -> str:
        """64 hex digits, equal for plans that run alike: SHA-256 of the canonical JSON without `prediction`.

        Canonical: keys sorted, no spaces, non-ASCII characters escaped.
        """
        return self._own_digest

    @cached_property
    def _own_digest(self) -> str:
        return _digest(self.to_dict())

    def state_digest(self, ranks: int = 1) -> str:
        """`digest` of this plan with float32 residuals, and without the `second_moment` of local steps. Two plans with the same
        state digest can load each other's states.

        ranks: those of the group. Residuals of grids lie by rows, so rows of unequal lengths count, which 0.3 did not have.

        >>> from gradwire.core import EFSignSGD
        >>> from gradwire.plan import Uniform
        >>> tensors = [TensorInfo("weight", (4, 4), "float32")]
        >>> plan, narrow = (Uniform(EFSignSGD(), residual_dtype=d).plan(tensors) for d in ("float32", "int8"))
        >>> narrow.digest() == plan.digest(), narrow.state_digest() == plan.digest()
        (False, True)
        """
        data = self.to_dict()
        data["schedule"].pop("second_moment", None)
        on_grid = any("rowscatter" in each.link_tasks and any(spec.state for spec in each.specs) for each in self.buckets)
        if on_grid and len({*rows_of(ranks)}) > 1:
            data["rows"] = rows_of(ranks)
        for bucket in data["buckets"]:
            bucket["residual_dtype"] = "float32"
        return _digest(data)

    def check_against(self, tensors: Sequence[TensorInfo]) -> None:
        """Raise PlanError unless `tensors` are exactly the tensors that the plan was made for."""
        by_name = {tensor.name: tensor for tensor in tensors}
        if len(by_name) != len(tensors):
            raise PlanError(f"{len(tensors)} tensors have {len(by_name)} names: each tensor needs a name of its own.")
        planned = set(self.tensors)
        if planned != by_name.keys():
            raise PlanError(_other_names(planned, set(by_name)))
        for index, bucket in enumerate(self.buckets):
            members = [by_name[name] for name in bucket.tensors]
            numel = sum(tensor.numel for tensor in members)
            if bucket.numel and numel != bucket.numel:
                raise PlanError(
                    f"bucket {index} ({_some(bucket.tensors)}) has {numel:_} elements, but the plan was made for "
                    f"{bucket.numel:_}. The model changed after planning. {_CURE}"
                )
            on_cpu = next((tensor.name for tensor in members if tensor.device == "cpu"), None)
            if on_cpu is not None and any(task.endswith(":gpu") for task in bucket.option):
                raise PlanError(
                    f"bucket {index} compresses on the gpu, but tensor {on_cpu!r} is on the cpu. Move the model before "
                    f"`parallelize`, or plan for this device. {_CURE}"
                )
        found = fingerprint(tensors)
        if found != self.fingerprint:
            raise PlanError(
                f"the model's fingerprint is {found[:12]}, but the plan was made for {self.fingerprint[:12]}: the "
                f"{len(tensors)} names agree, and shapes or dtypes do not. {_CURE}"
            )


def _other_names(planned: set[str], names: set[str]) -> str:
    parts = [f"the model has {len(names)} trainable tensors, but the plan was made for {len(planned)}."]
    if names - planned:
        parts.append(f"Only the model has {_some(sorted(names - planned))}.")
    if planned - names:
        parts.append(f"Only the plan has {_some(sorted(planned - names))}.")
    return " ".join([*parts, "The model changed after planning, or parameters were frozen.", _CURE])


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


def _digest(plan: dict[str, Any]) -> str:
    plan.pop("prediction", None)
    return hashlib.sha256(json.dumps(plan, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def _as_bucket_spec(value: object, tensors: tuple[str, ...]) -> Spec | dict[str, Spec]:
    if not isinstance(value, Mapping) or isinstance(value.get("id"), str):
        return as_spec("spec", value)
    with under("spec"):
        specs = {str(name): as_spec(f"[{show(name)}]", spec) for name, spec in value.items()}
    for name in tensors:
        if name not in specs:
            raise FormatError(
                f"spec has no entry for tensor {show(name)} of this bucket. A map needs every tensor: add an entry."
            )
    known = {*tensors}
    for name, spec in specs.items():
        if name not in known:
            raise FormatError(f"spec[{show(name)}] is {show(spec)}, but this bucket has no such tensor{near(name, tensors)}.")
    main = next((name for name in tensors if specs[name].encodes), tensors[0])
    for name in tensors:
        own, other = specs[name], specs[main]
        if own.encodes != other.encodes and not other.carries_uncompressed:
            raise FormatError(
                f"spec[{show(name)}] is {show(own)} and spec[{show(main)}] is {show(other)}, whose compressor takes whole "
                "buckets: no tensor can travel uncompressed beside it. Put the tensors in two buckets."
            )
        if own.encodes and own.family != other.family:
            raise FormatError(
                f"spec[{show(name)}] is {show(own)} and spec[{show(main)}] is {show(other)}: two families cannot share "
                "one exchange. Put the tensors in two buckets."
            )
    return {name: specs[name] for name in tensors}


def _check_task(field: str, task: object) -> None:
    what, colon, where = task.partition(":") if isinstance(task, str) else ("", "", "")
    if what in CODEC_TASKS and colon:
        places: tuple[str, ...] = ("gpu", "cpu")
    elif colon and is_link_word(what):
        places = LINKS
    else:
        words = CODEC_TASKS + link_words()
        raise FormatError(
            f"{field} is {show(task)}: it must be task:where, the task one of {', '.join(words)}{near(what, words)}."
        )
    if where not in places:
        raise FormatError(f"{field} is {show(task)}: {what} runs on {' or '.join(places)}. Write {what}:{places[0]}, say.")


def _check_words(bucket: Bucket) -> None:
    """Refuse words of another package's collective outside of the collective's own option."""
    brought = next((task for task in bucket.link_tasks if task not in ROUTINES), None)
    if brought is not None and collective_of(bucket.option) is None:
        raise FormatError(
            f"option is {show(list(bucket.option))}: the collective of {brought} has other tasks too. Write the whole option of "
            "the collective, which `gradwire options --collectives` shows."
        )


def _check_tensors(buckets: tuple[Bucket, ...]) -> None:
    if not buckets:
        raise FormatError("buckets is []: a plan has at least one bucket.")
    for index, bucket in enumerate(buckets):
        unique(f"buckets[{index}].tensors", bucket.tensors, "")
    owner: dict[str, int] = {}
    for index, bucket in enumerate(buckets):
        for name in bucket.tensors:
            if name in owner:
                raise FormatError(
                    f"buckets[{index}].tensors has {show(name)}, and so has buckets[{owner[name]}]: a gradient is "
                    "synchronised once. Remove one."
                )
            owner[name] = index


def _check_launch(launch: tuple[tuple[int, str], ...], buckets: tuple[Bucket, ...]) -> None:
    due = [bucket.link_tasks for bucket in buckets]
    done = [0] * len(buckets)
    for position, (index, task) in enumerate(launch):
        field = f"launch[{position}]"
        whole(f"{field}[0]", index, "a bucket's index", low=0, high=len(buckets) - 1)
        tasks = due[index]
        if done[index] == len(tasks) or task != tasks[done[index]]:
            expected = tasks[done[index]] if done[index] < len(tasks) else "nothing more"
            raise FormatError(
                f"{field} is {show([index, task])}, where {expected} of bucket {index} is due: each link task of its "
                f"option {show(list(buckets[index].option))} is launched once, in the option's order."
            )
        done[index] += 1
    for index, tasks in enumerate(due):
        if done[index] < len(tasks):
            missing = [index, tasks[done[index]]]
            raise FormatError(f"launch has no {missing}: every link task is launched once. Add it.")
