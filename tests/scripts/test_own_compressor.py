"""The compressor of examples/own_compressor, installed as a package: found by id and by name, keeps its law, trains."""

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "examples" / "own_compressor"

SCRIPT = """
import sys
import torch
import torch.distributed as dist
import gradwire as gw
from gradwire.core import spec_from_dict
from gradwire.core.specs import spec_from_text

spec = spec_from_dict({"id": "mulaw", "mu": 100.0})
assert "gradwire_mulaw" in sys.modules and repr(spec) == "MuLaw(mu=100.0)", spec
assert spec_from_text("ErrorFeedback(MuLaw())") == gw.ErrorFeedback(type(spec)())

dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
model = torch.nn.Linear(40, 30)
handle = gw.parallelize(model, plan=gw.Uniform(gw.ErrorFeedback(spec), bucket_bytes=100))
given, got = torch.zeros(2, 30, 40)
for step in range(50):
    x = torch.randn(8, 40)
    model.zero_grad()
    model(x).square().sum().backward()
    with torch.no_grad():
        given += 2 * model(x).T @ x
    got += model.weight.grad
assert float((given - got).norm() / given.norm()) < 0.01
wire = handle.stats()
assert wire.gradient_bytes == 4 * 1230
print("trained")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    source = tmp_path_factory.mktemp("source")
    for file in PACKAGE.iterdir():
        if file.is_file():
            (source / file.name).write_bytes(file.read_bytes())
    done = subprocess.run([*command, "--target", str(folder), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def test_it_is_under_sixty_lines() -> None:
    assert len((PACKAGE / "gradwire_mulaw.py").read_text().splitlines()) < 60


def test_an_installed_package_brings_its_own_compressor(installed: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.path.insert(0, {str(installed)!r})\n{SCRIPT}"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "store")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained\n"
