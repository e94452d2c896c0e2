"""torchrun on one emulated node: `elastic.py NODES SCRIPT ARGUMENTS`; takes its place from the variables of the testbed."""

import os
import sys

from torch.distributed.run import main

if __name__ == "__main__":
    nodes, *command = sys.argv[1:]
    address, node = os.environ["MASTER_ADDR"], os.environ["NODE_RANK"]
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    rendezvous = ["--rdzv-backend=c10d", f"--rdzv-endpoint={address}:29444", f"--rdzv-conf=is_host={int(node == '0')}"]
    limits = ["--nproc-per-node=1", "--max-restarts=10", "--monitor-interval=0.2"]
    main([f"--nnodes={nodes}", f"--node-rank={node}", *rendezvous, *limits, *command])
