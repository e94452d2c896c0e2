"""Wrong files for tests: valid documents, and what an accident or another program makes of them.

`GRADWIRE_FUZZ_EXAMPLES` is the number of files per format and test, 30 if it is not set.
"""

import copy
import json
import math
import os
import re
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from test_core_formats import clusters, costs, plans, profiles, schedules
from test_core_specs import specs

from gradwire.core import Cluster, Costs, Made, Plan, Profile
from gradwire.core.strict import Document
from gradwire.plan import Policy
from gradwire.record.run import (
    Alternative,
    BucketRecord,
    Decision,
    Interval,
    MemoryRecord,
    Rival,
    Run,
    StepRecord,
    TensorRecord,
)
from gradwire.sim import RESOURCES
from gradwire.sim.timeline import Bubble, Event, Resource, Timeline

__all__ = ["DOCUMENTS", "broken_bytes", "broken_fields", "fuzzed"]

EXAMPLES = int(os.environ.get("GRADWIRE_FUZZ_EXAMPLES", "30"))
fuzzed = settings(
    max_examples=EXAMPLES,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],  # plans of many buckets, long strings
)

policies = st.builds(
    Policy,
    default=specs,
    rules=st.lists(st.tuples(st.text(min_size=1, max_size=8), specs), max_size=3),
    schedule=schedules,
    scheme=st.sampled_from([None, "allreduce", "allgather", "alltoall"]),
    bucket_bytes=st.none() | st.integers(1, 2**40),
    edge_bytes=st.integers(1, 2**40),
    chunk_bytes=st.integers(0, 2**40),
)
words, numbers, counts = st.text(min_size=1, max_size=8), st.floats(0, 1e9), st.integers(0, 2**40)
later = st.floats(1e9, 2e9)
intervals = st.builds(Interval, ratio=numbers, low=numbers, high=numbers)
points = st.dictionaries(st.integers(0, 9999), numbers, max_size=3).map(lambda d: tuple(sorted(d.items())))
timelines = st.builds(
    Timeline,
    **{name: numbers for name, kind in Timeline.__annotations__.items() if kind is float},
    schedule=st.sampled_from(["backward", "pipelined", "delayed"]),
    steps=st.integers(1, 9),
    simulated_steps=counts,
    steady=st.booleans(),
    resources=st.lists(st.builds(Resource, st.sampled_from(RESOURCES), numbers, numbers), max_size=2).map(tuple),
    bubbles=st.lists(st.builds(Bubble, numbers, later, st.lists(counts, max_size=2).map(tuple)), max_size=1).map(tuple),
    events=st.lists(
        st.builds(Event, words, st.sampled_from(RESOURCES), st.floats(-1e9, 1e9), later, st.integers(-1, 9)),
        max_size=3,
    ).map(tuple),
)
rivals = st.builds(
    Rival,
    name=words,
    step_us=numbers,
    sent_bytes=st.none() | counts,
    speedup=intervals,
    again=st.none() | intervals,
    end_s=st.just((0.5, 1.5)),
    loss=st.tuples(st.floats(-9, 9), numbers),
)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    plan = draw(plans())
    measured = "exchange_us", "predicted_us", "sent_energy", "residual_norm", "error_norm"
    ratios = dict.fromkeys(measured, st.none() | numbers)
    bucket = st.builds(BucketRecord, **dict.fromkeys(BucketRecord.__struct_fields__, counts) | ratios)
    step = st.builds(
        StepRecord,
        step=counts,
        loss=st.none() | st.floats(-9, 9),
        **dict.fromkeys(("end_s", "step_us", "exposed_us", "codec_us"), numbers),
    )
    tensor = st.builds(TensorRecord, name=words, numel=counts, bits=points, error=points)
    return Run(
        made=Made(host=draw(words), date=draw(words), command=draw(words)),
        model=draw(words),
        device=draw(words),
        world_size=draw(st.integers(1, 9)),
        nodes=draw(st.integers(1, 9)),
        decision=Decision(
            by=draw(words),
            words=tuple(draw(st.lists(words, max_size=2))),
            alternatives=(Alternative(name=draw(words), step_us=draw(numbers), kept=draw(st.booleans())),),
        ),
        plan=plan,
        steps=tuple(draw(st.lists(step, max_size=2))),
        buckets=tuple(draw(bucket) for _ in plan.buckets),
        tensors=tuple(draw(st.lists(tensor, max_size=2, unique_by=lambda each: each.name))),
        memory=draw(st.builds(MemoryRecord, **dict.fromkeys(MemoryRecord.__struct_fields__, counts))),
        timeline=draw(st.none() | timelines),
        rivals=tuple(draw(st.lists(rivals, max_size=1))),
        notes=tuple(draw(st.lists(words, max_size=2))),
    )


DOCUMENTS: dict[type[Document], st.SearchStrategy[Document]] = {
    Plan: plans(),
    Profile: profiles,
    Cluster: clusters,
    Costs: costs,
    Policy: policies,
    Run: runs(),
}

HUGE = "1" + 5000 * "0"


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


# ---- bytes

TOKENS = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"-0", b"-0.0", b"-1", b"0", b"1.5", b"true", b"null",
    b"[]", b"{}", b'""', b"[[]]", b"1" + b"0" * 18, HUGE.encode(), b"-" + HUGE.encode(), b"0." + b"0" * 5000 + b"1",
    rb'"\ud800"', rb'"\udc00\ud800"', rb'"\u0000"', b'"\xed\xa0\x80"', b'"\xc0\x80"', b'"' + b"x" * 100_000 + b'"',
    b'"' + "\N{SNOWMAN}\N{FROG FACE}".encode() * 5000 + b'"', b"[" * 100_000, b'{"a":' * 100_000,
    b"[" * 40 + b"]" * 40, b"[" * 900 + b"]" * 900, b"[" + b"[]," * 1000 + b"0]", b"[" + b'{"":0},' * 1000 + b"0]",
    b"[" + b"0," * 2000 + b"0]", b'{"id":"error_feedback","inner":' * 300 + b"1" + b"}" * 300,
]  # fmt: skip
INSERTS = [
    b"\xff",
    b"\xfe\xff",
    b"\xef\xbb\xbf",
    b"\0",
    b"\n",
    b'"',
    b"\\",
    b",",
    b":",
    b"}",
    b"]",
    b"//",
    b"'",
    *TOKENS,
]
TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?[0-9][0-9.e+-]*|true|false|null')
PAIR = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:\s*(?:"(?:[^"\\]|\\.)*"|-?[0-9][0-9.e+-]*|true|false|null)')


@st.composite
def broken_bytes(draw: st.DrawFn, document: Document) -> bytes:
    """The document's file, with one to three accidents."""
    data = document.to_json(draw(st.sampled_from([None, 2]))).encode()
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        data = draw(st.sampled_from([_truncated, _flipped, _inserted, _spliced, _exchanged, _exchanged, _twice, _recoded]))(
            draw, data
        )
    return data


def _place(draw: st.DrawFn, data: bytes) -> int:
    return draw(st.integers(0, len(data)))


def _truncated(draw: st.DrawFn, data: bytes) -> bytes:
    return data[: _place(draw, data)]


def _flipped(draw: st.DrawFn, data: bytes) -> bytes:
    place, bit = _place(draw, data), draw(st.integers(0, 7))
    return data[:place] + bytes(byte ^ 1 << bit for byte in data[place : place + 1]) + data[place + 1 :]


def _inserted(draw: st.DrawFn, data: bytes) -> bytes:
    place = draw(st.sampled_from([0, len(data)]) | st.integers(0, len(data)))
    return data[:place] + draw(st.sampled_from(INSERTS) | st.binary(max_size=8)) + data[place:]


def _spliced(draw: st.DrawFn, data: bytes) -> bytes:
    """A part of the file stands in the place of another."""
    low, high = sorted((_place(draw, data), _place(draw, data)))
    place, end = sorted((_place(draw, data), _place(draw, data)))
    return data[:place] + data[low:high] + data[end:]


def _exchanged(draw: st.DrawFn, data: bytes) -> bytes:
    """One token is another."""
    places = [match.span() for match in TOKEN.finditer(data)]
    if not places:
        return data
    start, end = draw(st.sampled_from(places))
    return data[:start] + draw(st.sampled_from(TOKENS)) + data[end:]


def _twice(draw: st.DrawFn, data: bytes) -> bytes:
    """One field stands twice."""
    places = [match.span() for match in PAIR.finditer(data)]
    if not places:
        return data
    start, end = draw(st.sampled_from(places))
    return data[:end] + b", " + data[start:end] + data[end:]


def _recoded(draw: st.DrawFn, data: bytes) -> bytes:
    return data.decode(errors="replace").encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig", "utf-7"])))


# ---- fields

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2, 0.0, -0.0, 1.0, 0.5, -0.5, 1e300, math.nan, math.inf, -math.inf, 2**31, 2**63,
    10**12, 10**18, 10**30, -(10**30), 10**400, "", "1", "float32", "qsgd", "\ud800", "\0", "a" * 50_000,
    [], {}, [[]], [0], [None], ["a"], [0, 1, 2], _nested(40), _nested(200), {"id": "qsgd"}, {"id": "cast", "bits": 4},
    {"id": "error_feedback", "inner": {"id": "identity"}}, {"\ud800": 1}, {"kind": "delayed", "k": 10**18},
]  # fmt: skip
RENAMED = ["colour", "", "a`b", "x - at `$.version", "\ud800", "new\nline", "k" * 50_000, "bandwidth", "step_ms"]
UNITS = {"_us": "_ms", "gbps": "mbps", "_bytes": "_kb", "bytes_": "kb_"}
# a rule that joins two fields may name the other
PARTNERS = {
    "tensors": {"spec"},
    "option": {"launch"},
    "buckets": {"launch"},
    "kind": {"schedule"},
    "id": {"spec", "default", "rules", "correction", "inner"},
    "inner": {"spec", "default", "rules", "correction"},
}


@st.composite
def broken_fields(draw: st.DrawFn, document: Document) -> tuple[bytes, set[str]]:
    """The document's file with one wrong field, and the names by which an error may name it."""
    data: Any = json.loads(document.to_json())
    path = draw(st.sampled_from(list(_paths(data))))
    parent = data
    for part in path[:-1]:
        parent = parent[part]
    last = path[-1]
    fields = [part for part in path if isinstance(part, str)]
    names = {fields[-1]} | PARTNERS.get(fields[-1], set())
    if "spec" in fields[:-1]:
        names |= {"spec"}  # of a map from tensors to specs, whose keys are no fields
    kind = draw(st.sampled_from(["drop", "rename", "add", "wrap", "double", "value", "value", "value"]))
    if kind == "drop":
        del parent[last]
    elif kind == "rename" and isinstance(last, str):
        unit = next((last.replace(a, b) for a, b in UNITS.items() if a in last), "colour")
        new = draw(st.sampled_from([unit, last + "x", last.upper(), *RENAMED]))
        names |= _shown(new) | ({"spec"} if "spec" in fields else set())
        parent[new] = parent.pop(last)
    elif kind == "add" and isinstance(last, str):
        new = draw(st.sampled_from(RENAMED))
        names = _shown(new) | ({"spec"} if "spec" in fields else set())
        parent[new] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    elif kind == "double" and isinstance(last, int):
        parent.insert(last, copy.deepcopy(parent[last]))
    elif kind == "wrap":
        parent[last] = [parent[last]]
    else:
        parent[last] = copy.deepcopy(draw(st.sampled_from(VALUES)))
    return json.dumps(data, indent=draw(st.sampled_from([None, 2]))).encode(), names


def _paths(data: Any, path: tuple[str | int, ...] = ()) -> Any:
    members = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for part, value in members:
        yield (*path, part)
        yield from _paths(value, (*path, part))


def _shown(name: str) -> set[str]:
    return {name if name else "''", repr(name)[:40]}
