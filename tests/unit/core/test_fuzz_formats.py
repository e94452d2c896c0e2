"""Files that are wrong: refused by name, whatever is in them, and at no more memory than their size allows."""

import json
import os
import re
import string
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fuzz import DOCUMENTS, HUGE, broken_bytes, broken_fields, fuzzed
from hypothesis import given
from hypothesis import strategies as st
from test_core_formats import EXAMPLES

from gradwire.core import (
    QSGD,
    Bucket,
    Cast,
    Cluster,
    CodecCosts,
    Costs,
    Delayed,
    ErrorFeedback,
    Link,
    Made,
    Plan,
    Prediction,
    Profile,
    TensorProfile,
)
from gradwire.core.reading import MEMORY_FACTOR, SPARE_BYTES, check_plain
from gradwire.core.strict import Document
from gradwire.errors import FormatError, SpecError
from gradwire.record.run import (
    Alternative,
    BucketRecord,
    Decision,
    Interval,
    MemoryRecord,
    Rival,
    StepRecord,
    TensorRecord,
)
from gradwire.sim.timeline import Bubble, Event, Resource, Timeline

# Beyond ten times the file's size: what a first load keeps (the types of fields, compiled expressions; 32 KiB measured),
VALID_BYTES = 2**16
# and what json makes of 7,000 bytes of small objects, 30 times their size, where an accident doubles them thrice.
FUZZED_BYTES = 2**20

TEXT_PROBLEMS = ("is not JSON: ", "is not UTF-8: ", "reading its ", "lists and objects nest ", "the document")


STRUCTS = [
    *(*DOCUMENTS, Bucket, Prediction, TensorProfile, Link, CodecCosts, Made, Delayed, QSGD, Cast, ErrorFeedback),
    *(Alternative, BucketRecord, Decision, Interval, MemoryRecord, Rival, StepRecord, TensorRecord),
    *(Timeline, Event, Resource, Bubble),
]
FIELDS = {"id", "kind", *(name for struct in STRUCTS for name in struct.__struct_fields__)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "document.json"


def load(cls: type[Document], file: Path, data: bytes) -> tuple[Document | None, str, int]:
    """The document, or the error's message, and the most memory that it took. Any other exception fails the test."""
    file.write_bytes(data)
    document, message, peak = traced(cls, file)
    if peak > MEMORY_FACTOR * len(data) + VALID_BYTES:
        # a table of Python's own, such as that of interned strings, may have grown by megabytes just then
        peak = min(peak, traced(cls, file)[2])
    return document, message, peak


def traced(cls: type[Document], file: Path) -> tuple[Document | None, str, int]:
    tracemalloc.start()
    try:
        return cls.load(file), "", tracemalloc.get_traced_memory()[1]
    except (FormatError, SpecError) as error:
        assert type(error) in (FormatError, SpecError)
        return None, str(error), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def check_message(message: str, file: Path) -> str:
    """What a message says after the file's name. It is short, and can be printed."""
    start = f"{file}: "
    assert message.startswith(start), message[:300]
    assert len(message) < 1500 + len(start) and message.isprintable(), message[:300]
    message.encode()
    return message.removeprefix(start)


def check_round_trip(cls: type[Document], document: Document) -> None:
    again = cls.from_json(document.to_json())
    assert again == document
    assert again.to_json() == document.to_json()


@pytest.mark.parametrize("cls", DOCUMENTS)
@fuzzed
@given(data=st.data())
def test_a_valid_file_loads_round_trips_and_takes_little_memory(
    cls: type[Document], file: Path, data: st.DataObject
) -> None:
    document = data.draw(DOCUMENTS[cls])
    text = document.to_json(data.draw(st.sampled_from([None, 2]))).encode()
    loaded, message, peak = load(cls, file, text)
    assert loaded == document, message
    check_round_trip(cls, document)
    assert peak <= MEMORY_FACTOR * len(text) + VALID_BYTES


@pytest.mark.parametrize("cls", DOCUMENTS)
@fuzzed
@given(data=st.data())
def test_broken_bytes_are_refused_by_name(cls: type[Document], file: Path, data: st.DataObject) -> None:
    text = data.draw(broken_bytes(data.draw(DOCUMENTS[cls])))
    document, message, peak = load(cls, file, text)
    assert peak <= MEMORY_FACTOR * len(text) + FUZZED_BYTES
    if document is not None:
        check_round_trip(cls, document)
        return
    what = check_message(message, file)
    told = (
        " stands twice",
        " is not a field",
        " is no name",
        ": lists and objects nest deeper",
        ": half of a",
    )  # of any name
    assert what.startswith(TEXT_PROBLEMS) or any(words in what for words in told) or is_named(FIELDS, what), message


@pytest.mark.parametrize("cls", DOCUMENTS)
@fuzzed
@given(data=st.data())
def test_a_broken_field_is_refused_by_name(cls: type[Document], file: Path, data: st.DataObject) -> None:
    text, names = data.draw(broken_fields(data.draw(DOCUMENTS[cls])))
    document, message, peak = load(cls, file, text)
    assert peak <= MEMORY_FACTOR * len(text) + FUZZED_BYTES
    if document is not None:
        check_round_trip(cls, document)
        return
    what = check_message(message, file)
    assert is_named(names, what), f"{message}\nnames none of {names}"


def is_named(names: set[str], what: str) -> bool:
    """Whether the sentence begins with the path of one of the fields: the names before its first verb."""
    subject = re.split(r" (?:is|has|stands) ", what, maxsplit=1)[0]
    return any(name in subject for name in names)


def listed(items: Callable[[int], str]) -> Callable[[int], str]:
    return lambda count: "[" + ",".join(items(index) for index in range(count)) + "]"


def mapped(items: Callable[[int], str]) -> Callable[[int], str]:
    return lambda count: "{" + ",".join(f'"{short_name(index)}":{items(index)}' for index in range(count)) + "}"


def short_name(index: int) -> str:
    return "".join(string.ascii_letters[index // 52**place % 52] for place in range(4))


BUCKET = '{"tensors": %s, "spec": %s, "option": ["allreduce:inter"]}'
PLAN = '{"version": 1, "fingerprint": "f", "launch": [[0, "allreduce"]], "buckets": [' + BUCKET + "]}"
NAMES = listed(lambda index: f'"{short_name(index)}"')
DENSE: dict[str, tuple[type[Document], str, Callable[[int], str], int]] = {
    "objects by name": (Cluster, '{"version": 1, "nodes": %s}', mapped(lambda index: "{}"), 56_000),
    "fields": (Cluster, "%s", mapped(lambda index: "0"), 108_000),
    "names of tensors": (Plan, PLAN % ("%s", '{"id": "identity"}'), NAMES, 186_000),
    "a map of specs": (Plan, PLAN % ("[]", "%s"), mapped(lambda index: '{"id":"cast"}'), 61_000),
}
FROG = "\N{FROG FACE}" + "x" * 2_000_000  # the first letter makes four bytes of each of the others


@pytest.mark.parametrize("kind", DENSE)
def test_dense_files_take_ten_times_their_size_or_are_refused(kind: str, file: Path) -> None:
    """Of the densest texts of each kind the largest that is still read, and one that is a tenth larger."""
    cls, frame, content, count = DENSE[kind]
    for number in (count, count + count // 10):
        text = (frame % content(number)).encode()
        _, message, peak = load(cls, file, text)
        assert ("mostly brackets and commas" in message) == (number > count), message
        assert peak <= MEMORY_FACTOR * len(text) + SPARE_BYTES


@pytest.mark.parametrize(
    "frame", ['{"version": 1, "nodes": "%s"}', '{"version": 1, "%s": 1}', "%s", '{"version": "%s"}']
)
def test_long_strings_take_ten_times_their_size(frame: str, file: Path) -> None:
    text = (frame % FROG).encode()
    document, message, peak = load(Cluster, file, text)
    assert document is None and check_message(message, file)
    assert peak <= MEMORY_FACTOR * len(text) + FUZZED_BYTES


@pytest.mark.parametrize("cls", [Plan, Profile, Cluster, Costs])
@pytest.mark.parametrize(
    ("version", "words"),
    [
        (None, ["version is missing", '"version": 1']),
        ("0", ["version is 0", "reads version 1"]),
        ("-1", ["version is -1", "reads version 1"]),
        ('"1"', ["version is '1'", "reads version 1, a whole number"]),
        ("1.0", ["version is 1.0", "reads version 1, a whole number"]),
        ("true", ["version is True", "reads version 1, a whole number"]),
        ("null", ["version is None", "reads version 1, a whole number"]),
        ("[1]", ["version is [1]", "reads version 1, a whole number"]),
        ("2", ["version is 2", "reads version 1", "a later one wrote it", "Update gradwire"]),
        (HUGE, ["version is inf", "reads version 1"]),
    ],
)
def test_other_versions_are_refused_with_the_cure(
    cls: type[Document], version: str | None, words: list[str], file: Path
) -> None:
    """Before what else is wrong, since another version may have other fields."""
    data: Any = json.loads(EXAMPLES[cls])
    del data["version"]
    start = "{" if version is None else f'{{"version": {version}, '
    for text in (start + json.dumps(data)[1:], start + '"colour": 1}'):
        document, message, _ = load(cls, file, text.encode())
        assert document is None
        assert cls.remedy in message or version is None
        assert [word for word in words if word not in check_message(message, file)] == [], message


@pytest.mark.parametrize("cls", [Plan, Profile, Cluster, Costs])
def test_constructors_take_the_version_that_is_written(cls: type[Document]) -> None:
    document = cls.from_json(EXAMPLES[cls])
    for version in (0, 2, 1.0, True, "1", None, 10**5000):
        with pytest.raises(FormatError, match=r"version is .*writes version 1"):
            msgspec.structs.replace(document, version=version)


def test_numbers_that_are_large_make_nothing_large(file: Path) -> None:
    cluster: Any = json.loads(EXAMPLES[Cluster]) | {"nodes": 10**12, "ranks_per_node": 10**6}
    profile: Any = json.loads(EXAMPLES[Profile])
    profile["tensors"][0]["shape"] = [10**18, 10**18]
    costs: Any = json.loads(EXAMPLES[Costs])
    costs["codecs"][0]["encode"][1][0] = 10**18
    plan: Any = json.loads(EXAMPLES[Plan])
    plan["buckets"][0] |= {"numel": 10**18, "chunk_bytes": 10**18}
    for cls, data in [(Cluster, cluster), (Profile, profile), (Costs, costs), (Plan, plan)]:
        document, message, peak = load(cls, file, json.dumps(data).encode())
        assert document is not None, message
        assert peak < VALID_BYTES
        check_round_trip(cls, document)
    data = json.loads(EXAMPLES[Cluster]) | {"nodes": 2**63}
    _, message, _ = load(Cluster, file, json.dumps(data).encode())
    assert "nodes is 9223372036854775808" in message and "below 2**63" in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"nodes": 10**5000}, "nodes is 2**16609 or more"),
        ({5: 1}, "5 is no name, but a int"),
        ({"intra": {None: 1}}, "intra.None is no name, but a NoneType"),
        ({"\ud800": 1}, r"'\ud800' is no name"),
        ({"made": {"host": "a\udc00"}}, r"made.host is 'a\udc00': half of a surrogate pair"),
        ({"x" * 20_000: 1}, "it has 20_000 characters"),
    ],
)
def test_plain_data_is_checked_as_files_are(data: dict[Any, Any], words: str) -> None:
    with pytest.raises(FormatError) as caught:
        Cluster.from_dict(json.loads(EXAMPLES[Cluster]) | data)
    assert words in str(caught.value)


def test_data_that_holds_itself_is_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(FormatError, match="nest deeper"):
        check_plain({"a": loop})
    with pytest.raises(FormatError, match="nest deeper"):
        Cluster.from_dict(json.loads(EXAMPLES[Cluster]) | {"nodes": loop})


def test_paths_that_cannot_be_read_or_printed(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read: embedded null byte"):
        Plan.load("a\0b")
    with pytest.raises(FormatError, match="cannot be read: Is a directory"):
        Plan.load(tmp_path)
    with pytest.raises(FormatError, match="cannot be read") as caught:
        Plan.load(os.fsdecode(b"no\xffsuch"))
    str(caught.value).encode()
