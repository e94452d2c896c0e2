"""Files that are wrong: refused by name, whatever is in them."""

import json
import os
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fuzz import DOCUMENTS, broken_bytes, broken_fields, fuzzed
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

TEXT_PROBLEMS = ("is not JSON: ", "is not UTF-8: ", "lists and objects nest ", "the document")


STRUCTS = [
    *(*DOCUMENTS, Bucket, Prediction, TensorProfile, Link, CodecCosts, Made, Delayed, QSGD, Cast, ErrorFeedback),
    *(Alternative, BucketRecord, Decision, Interval, MemoryRecord, Rival, StepRecord, TensorRecord),
    *(Timeline, Event, Resource, Bubble),
]
FIELDS = {"id", "kind", *(name for struct in STRUCTS for name in struct.__struct_fields__)}


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "document.json"


def load(cls: type[Document], file: Path, data: bytes) -> tuple[Document | None, str]:
    """The document, or the error's message. Any other exception fails the test."""
    file.write_bytes(data)
    try:
        return cls.load(file), ""
    except (FormatError, SpecError) as error:
        assert type(error) in (FormatError, SpecError)
        return None, str(error)


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
def test_a_valid_file_loads_and_round_trips(cls: type[Document], file: Path, data: st.DataObject) -> None:
    document = data.draw(DOCUMENTS[cls])
    text = document.to_json(data.draw(st.sampled_from([None, 2]))).encode()
    loaded, message = load(cls, file, text)
    assert loaded == document, message
    check_round_trip(cls, document)


@pytest.mark.parametrize("cls", DOCUMENTS)
@fuzzed
@given(data=st.data())
def test_broken_bytes_are_refused_by_name(cls: type[Document], file: Path, data: st.DataObject) -> None:
    text = data.draw(broken_bytes(data.draw(DOCUMENTS[cls])))
    document, message = load(cls, file, text)
    if document is not None:
        check_round_trip(cls, document)
        return
    what = check_message(message, file)
    told = (
        " stands twice",
        " is not a field",
        ": lists and objects are nested deeper",
        ": half of a",
    )  # of any name
    assert what.startswith(TEXT_PROBLEMS) or any(words in what for words in told) or is_named(FIELDS, what), message


@pytest.mark.parametrize("cls", DOCUMENTS)
@fuzzed
@given(data=st.data())
def test_a_broken_field_is_refused_by_name(cls: type[Document], file: Path, data: st.DataObject) -> None:
    text, names = data.draw(broken_fields(data.draw(DOCUMENTS[cls])))
    document, message = load(cls, file, text)
    if document is not None:
        check_round_trip(cls, document)
        return
    what = check_message(message, file)
    assert is_named(names, what), f"{message}\nnames none of {names}"


def is_named(names: set[str], what: str) -> bool:
    """Whether the sentence begins with the path of one of the fields: the names before its first verb."""
    subject = re.split(r" (?:is|has|stands) ", what, maxsplit=1)[0]
    return any(name in subject for name in names)


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
        ("2", ["version is 2", "reads version 1", "a later release wrote the file", "Update gradwire"]),
    ],
)
def test_other_versions_are_refused_with_the_cure(cls: type[Document], version: str | None, words: list[str], file: Path) -> None:
    """Before what else is wrong, since another version may have other fields."""
    data: Any = json.loads(EXAMPLES[cls])
    del data["version"]
    start = "{" if version is None else f'{{"version": {version}, '
    for text in (start + json.dumps(data)[1:], start + '"colour": 1}'):
        document, message = load(cls, file, text.encode())
        assert document is None
        assert cls.remedy in message or version is None
        assert [word for word in words if word not in check_message(message, file)] == [], message


@pytest.mark.parametrize("cls", [Plan, Profile, Cluster, Costs])
def test_constructors_take_the_version_that_is_written(cls: type[Document]) -> None:
    document = cls.from_json(EXAMPLES[cls])
    for version in (0, 2, 1.0, True, "1", None):
        with pytest.raises(FormatError, match=r"version is .*writes version 1"):
            msgspec.structs.replace(document, version=version)


def test_numbers_that_are_large_make_nothing_large(file: Path) -> None:
    profile: Any = json.loads(EXAMPLES[Profile])
    profile["tensors"][0]["shape"] = [10**18, 10**18]
    costs: Any = json.loads(EXAMPLES[Costs])
    costs["codecs"][0]["encode"][1][0] = 10**18
    plan: Any = json.loads(EXAMPLES[Plan])
    plan["buckets"][0] |= {"numel": 10**18, "chunk_bytes": 10**18}
    for cls, data in [(Profile, profile), (Costs, costs), (Plan, plan)]:
        document, message = load(cls, file, json.dumps(data).encode())
        assert document is not None, message
        check_round_trip(cls, document)
    most: Any = json.loads(EXAMPLES[Cluster]) | {"nodes": 100, "ranks_per_node": 1000, "slow_nodes": [], "slow_at": []}
    assert load(Cluster, file, json.dumps(most).encode())[0] is not None
    for nodes, ranks in ((101, 101_000), (10**12, 10**15)):
        _, message = load(Cluster, file, json.dumps(most | {"nodes": nodes}).encode())
        assert f"nodes times ranks_per_node is {ranks}: memory and time" in message and "at most 100,000. Write fewer" in message
    data = json.loads(EXAMPLES[Cluster]) | {"nodes": 2**63}
    _, message = load(Cluster, file, json.dumps(data).encode())
    assert "nodes is 9223372036854775808" in message and "below 2**63" in message


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"\ud800": 1}, r"'\ud800' is '\ud800': half of a surrogate pair"),
        ({"made": {"host": "a\udc00", "date": "", "command": ""}}, r"made.host is 'a\udc00': half of a surrogate pair"),
    ],
)
def test_plain_data_is_checked_as_files_are(data: dict[Any, Any], words: str) -> None:
    with pytest.raises(FormatError) as caught:
        Cluster.from_dict(json.loads(EXAMPLES[Cluster]) | data)
    assert words in str(caught.value)


def test_paths_that_cannot_be_read_or_printed(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be read: embedded null byte"):
        Plan.load("a\0b")
    with pytest.raises(FormatError, match="cannot be read: Is a directory"):
        Plan.load(tmp_path)
    with pytest.raises(FormatError, match="cannot be read") as caught:
        Plan.load(os.fsdecode(b"no\xffsuch"))
    str(caught.value).encode()
