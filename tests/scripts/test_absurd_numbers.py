"""Times and rates that are wrong by many powers of ten, as typing errors make them: a sentence, and no traceback."""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from interpreters import Interpreters

PROFILE: dict[str, Any] = {
    "version": 1,
    "model": "m",
    "batch": 1,
    "device": "V100",
    "tensors": [
        {"name": f"t{i}", "shape": [1000, 100], "dtype": "float32", "backward_us": 10.0, "forward_us": 3.0} for i in range(4)
    ],
}
CLUSTER: dict[str, Any] = {
    "version": 1,
    "nodes": 2,
    "ranks_per_node": 1,
    "intra": {"alpha_us": 5.0, "gbps": 400.0},
    "inter": {"alpha_us": 30.0, "gbps": 25.0},
}
COSTS: dict[str, Any] = {
    "version": 1,
    "codecs": [
        {
            "spec": {"id": "qsgd", "bits": 4, "block": 128},
            "device": "gpu",
            "encode": [[4096, 12.0], [4194304, 40.0]],
            "decode": [[4096, 9.0], [4194304, 25.0]],
        }
    ],
}


def planned(
    interpreters: Interpreters, folder: Path, changed: str, path: list[Any], value: object, *more: str
) -> "subprocess.CompletedProcess[str]":
    documents = {"profile": PROFILE, "cluster": CLUSTER, "costs": COSTS}
    for name, document in documents.items():
        part = here = copy.deepcopy(document)
        if name == changed:
            for key in path[:-1]:
                here = here[key]
            here[path[-1]] = value
        (folder / f"{name}.json").write_text(json.dumps(part))
    files = [str(folder / "profile.json"), *(f"--{n}={folder / n}.json" for n in ("cluster", "costs"))]
    argv = [sys.executable, "-m", "gradwire", "plan", *files, "--spec", "QSGD(bits=4)", *more]
    return interpreters.run(argv, timeout=100)


@pytest.mark.parametrize(
    ("changed", "path", "value"),
    [
        ("cluster", ["inter", "gbps"], 1e-310),
        ("cluster", ["inter", "gbps"], 1e-12),
        ("cluster", ["inter", "alpha_us"], 1e308),
        ("profile", ["tensors", 0, "backward_us"], 1e308),
        ("profile", ["tensors", 0, "forward_us"], 1e300),
        ("costs", ["codecs", 0, "encode"], [[0, 0.0], [1, 1e308]]),
    ],
    ids=str,
)
def test_a_plan_is_refused_in_words(
    interpreters: Interpreters, tmp_path: Path, changed: str, path: list[Any], value: object
) -> None:
    ended = planned(interpreters, tmp_path, changed, path, value)
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 2 and "powers of ten" in " ".join(ended.stderr.split())


def test_the_same_documents_without_the_error_are_planned(interpreters: Interpreters, tmp_path: Path) -> None:
    assert planned(interpreters, tmp_path, "", [], None).returncode == 0
    ended = planned(interpreters, tmp_path, "", [], None, "--memory-mb", "1e303")
    assert ended.returncode == 2 and "below 1e12" in ended.stderr
