"""Run benchmarks: `python -m benchmarks [part [its options]]`; without a part, those of DEFAULT.

A part is a module with `run(arguments) -> int`, the exit status.
"""

import importlib
import os
import sys

from gradwire.errors import GradwireError

CAMPAIGNS = {
    "methods": "jobs x links x methods as `gradwire bench`, with more options, parts of steps and other libraries' methods",
    "predict": "predicted steps beside measured steps",
    "predict_ranks": "the same for 2 to 32 ranks, cell by cell: goes on where it stopped",
    "ceiling": "fake compression: the gain that more compression could bring",
    "phases": "the exposed time of the reduce and the gather phase",
}
"""Parts in `benchmarks/campaigns`."""
PARTS = {
    **CAMPAIGNS,
    "plan": "`gradwire plan` with the papers' own methods of planning too, such as cupcake",
    "kernels": "GB/s of every kernel at every SIMD level, beside a copy and the plain-torch reference",
    "builds": "two builds of the C++ kernels beside each other: is any kernel slower than it was?",
    "gpu": "what one GPU can show in ten minutes: bits, ranks over NCCL, speed, the host's time, the tests marked `gpu`",
    "variants": "compiles the Triton kernels that trainings launch, for GPUs that need not be there, by any version of Triton",
    "compressors": "GB/s of every compressor as the engine calls it, beside a copy",
    "checksums": "what checksums add to encode and decode of a gradient that is in no cache",
    "exchange": "how near one bucket's exchange gets to the time its bytes take on the wire",
    "sums": "all-reduce of gloo beside sums on wires, for 2 to 32 ranks",
    "tls": "steps with encrypted connections beside steps with plain ones, over an emulated link",
    "shared_memory": "one exchange between ranks of a node: shared memory beside TCP, time and processor",
    "fusion": "milliseconds of the exact fusion search, and what it gains over the rules that others use",
    "options": "the sum and its error of every option of ByteComp's tree on 4 ranks as 2 nodes",
    "figures": "the papers' figures in simulation, from published profiles: writes docs/figures.md",
    "side_by_side": "the papers' systems beside gradwire's joint plan: docs/side_by_side.md; --measure measures cells",
    "search_times": "the papers' search times and more of their figures: writes docs/search_times.md",
    "offload": "codecs on a sleeping accelerator, on CPUs and on both: steps beside their predictions",
    "schemes": "one bucket by every scheme, flat and hierarchical, beside the prediction: docs/schemes.md",
    "uneven": "exchanges with one slow node and with slow uplinks, beside what they are priced with",
    "shards": "direct exchanges with a slow uplink: equal shards and shards by uplinks, beside the least time",
    "laboratory": "errors of the emulated network between sites: round trip, rate, loss",
    "planner": "milliseconds of planning by each method, and the steps of their plans",
    "matrix": "auto beside DDP and torch's hooks: docs/matrix.md; --measure measures cells",
    "steps": "step times of every compressor on slow links, beside DDP and PyTorch's PowerSGD hook",
    "accuracy": "what a codec costs in learning: held-out loss of any number of ranks in one process, paired by seed",
    "losses": "loss of the transformer and the CNN with every compressor and with plain DDP, several seeds",
    "convergence": "held-out loss and accuracy of the delayed schedule beside synchronous SGD, paired by seed",
    "cd_sgd": "what CD-SGD's corrections bring: losses and seconds of 2-bit thresholds, with and without them",
    "bits": "bytes of the exact choice of bits by tensor beside CGX's rules at equal error, and what is learned with it",
    "adaptive": "adaptive bits, for bytes and for time, beside uniform 4 bits and auto: steps and losses on slow links",
    "delayed": "mean steps of the delayed schedule beside equation 7 of CD-SGD, whose parts are measured apart",
    "tuning": "Bayesian optimisation of the bucket size on live jobs, beside random search and the best of a grid",
    "first": "auto from its first step: when it has decided, and whether it was behind DDP by then",
    "tutorials": "the scripts of the two tutorials on real data, DDP beside gradwire: their pictures and tables",
    "frameworks": "HF Trainer, Accelerate, Lightning, the DDP hook, FSDP2 and HSDP over slow links, with DDP and the possible",
    "compiled": "torch.compile in each integration: the communication that is not hidden, over 200 Mb/s",
    "fsdp2_losses": "held-out loss of FSDP2 with compressed gradients and parameters over native FSDP2's, paired by seed",
    "torch_tests": "PyTorch's own tests of process groups and DDP with gradwire in gloo's place",
    "drift": "steps until auto has answered a link that becomes ten times slower in mid-run, and the way back",
    "growth": "the time beyond the floor against tensors, elements and ranks: writes docs/growth.md",
    "local": "held-out loss against seconds: local steps beside auto on slow links; tables in docs/local_steps.md",
    "outer": "held-out loss of outer steps of local steps beside the mean of weights, in one process: docs/local_steps.md",
    "wan": "held-out loss against seconds between two sites, gradwire beside other methods: writes docs/sites_measured.md",
    "many_nodes": "steps on 2 to 32 nodes: DDP, exact, fixed specs, auto: writes docs/many_nodes.md",
    "far": "steps between two sites by their distance: DDP, the schedules and auto: writes docs/far_links.md",
    "unequal": "ranks that are not equally fast: samples a second, and losses at equal samples: docs/how-to/unequal.md",
    "members": "members that are killed and come again: torchft beside gw.elastic over slow links, samples and losses",
    "islands": "what the exchange between two islands of FSDP2 adds to a step, over a slow link",
    "slow_links": "how slow a link may be for each way to train, in simulation: writes docs/slow_links.md",
    "page": "writes docs/compressors.md from the results",
    "readme": "writes the README's table from the results",
    "learning": "loss of the transformer with gradwire and with plain DDP, several seeds",
}
DEFAULT = ("kernels", "compressors", "exchange")


def main(arguments: list[str]) -> int:
    """Run the part that is named first, or the default ones."""
    if arguments and arguments[0] in ("-h", "--help"):
        print("usage: python -m benchmarks [part [its options]]\n")
        print("\n".join(f"  {part:<14}{what}" for part, what in PARTS.items()))
        print(f"\nWithout a part: {', '.join(DEFAULT)}.")
        return 0
    if arguments and arguments[0] not in PARTS:
        print(f"there is no benchmark {arguments[0]!r}; there are: {', '.join(PARTS)}", file=sys.stderr)
        return 2
    os.environ.setdefault("GRADWIRE_RECORD_ARGUMENTS", "1")  # a result says how to get it again
    chosen = [(arguments[0], arguments[1:])] if arguments else [(part, []) for part in DEFAULT]
    try:
        return max(importlib.import_module(_module(part)).run(options) for part, options in chosen)
    except GradwireError as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2


def _module(part: str) -> str:
    return f"benchmarks.campaigns.{part}" if part in CAMPAIGNS else f"benchmarks.{part}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
