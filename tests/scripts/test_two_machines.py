"""The commands that the documentation shows for two machines start a job where host names do not help.

Each machine's name leads to 127.0.1.1, as the installers of Debian and Ubuntu set it up, and neither knows the other one's name.
"""

import shlex
import sys
from pathlib import Path

import pytest
from doc_blocks import blocks

from gradwire.testbed import EmulatedCluster
from gradwire.testbed.network import address_of

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT = """
import socket
import torch.distributed as dist
dist.init_process_group("gloo")
try:
    socket.gethostbyname(f"node{1 - dist.get_rank()}")
except OSError:
    print(f"rank {dist.get_rank()} of {dist.get_world_size()} knows no other name", flush=True)
dist.barrier()
dist.destroy_process_group()
"""
MACHINE = """
grep -v node /etc/hosts > hosts.$NODE_RANK
echo 127.0.1.1 node$NODE_RANK >> hosts.$NODE_RANK
cat hosts.$NODE_RANK > /etc/hosts
number=$NODE_RANK
unset RANK WORLD_SIZE LOCAL_RANK GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT
if [ $number = 0 ]; then exec {first}; else exec {second}; fi
"""


def commands_of(page: str) -> list[str]:
    """The page's commands for the first and the second machine, in one line each."""
    texts = [block.text for block in blocks(DOCS / page) if "--local-addr" in block.text]
    assert len(texts) == 2
    return [" ".join(shlex.split(text.replace("\\\n", " "))) for text in texts]


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize(
    ("page", "program"),
    [
        pytest.param("how-to/launch.md", "train.py", id="launch", marks=pytest.mark.thorough),
        pytest.param("tutorials/two-machines.md", "-m gradwire doctor", id="tutorial"),
    ],
)
def test_the_commands_for_two_machines_start_a_job(
    page: str, program: str, clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(SCRIPT)
    first, second = (
        command.replace("10.0.0.1", address_of(0))
        .replace("10.0.0.2", address_of(1))
        .replace("torchrun", f"{shlex.quote(sys.executable)} -m torch.distributed.run", 1)
        .replace(program, "train.py")
        for command in commands_of(page)
    )
    said: list[str] = []
    with EmulatedCluster(2) as cluster:
        script = MACHINE.format(first=first, second=second)
        assert cluster.run(["bash", "-euc", script], on_line=lambda *line: said.append(line[2]), timeout=120.0) == 0, said
    assert {f"rank {rank} of 2 knows no other name" for rank in range(2)} <= {*said}
