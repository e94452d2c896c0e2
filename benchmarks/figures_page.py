"""docs/figures.md: tables from the results, and what they mean."""

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import table

HEAD = """# The papers' figures, simulated

What Cupcake's, ByteComp's and DeAR's papers measured on GPUs, made again with the planner and the simulator from the
profiles and codec times that ByteComp's authors published. Nothing here was measured by gradwire. Made on {date} by
the command below; do not edit.

```
python -m benchmarks figures --data DIR
```

DIR has `profiles/vgg16.json` and so on, and `v100-compressor-overheads.json` (inputs of zhuangwang93/Espresso at
a0294e3); the environment variable GRADWIRE_DATA may name it too. They are not part of gradwire. It takes some
minutes.

## What is assumed

- **Forward** takes half of backward (DeAR's equation 9): the profiles have backward only. For Cupcake's figures
  ResNet-50's times are shortened to the 48 ms that the paper tells for a step of one GPU. The other models' steps are
  not told, so they are the profiles'.
- **Codecs** run on the GPU; a decode of several payloads is one call ([decision 11](decisions/011-simulator.md)). What the
  published time of CPUs means is not told, so nothing is offloaded, and BytePS-Compress is missing.
- **FP32** is all-reduce in buckets of 25 MB, by the best uncompressed option. The papers had Horovod (64 MB) and
  BytePS.
- **Latencies** are 10 us inside a machine and 30 us between machines. No paper tells them.
- **Two rates are fitted**, each to one number of FP32: PCIe as {cupcake_pcie_gbps:.1f} Gb/s, from 56 ms of exposed
  communication (Cupcake, section 3.1), and 100 Gb/s Ethernet with TCP as {nvlink_inter_gbps:.1f} Gb/s, from BERT's
  0.51 (ByteComp, Table 1). All else is as the papers say: 25 Gb/s, NVLink 1200 Gb/s, and for ByteComp's machines PCIe
  100 Gb/s.
- Both papers show most numbers in bars and curves only. "paper" is what their texts tell: mostly the greatest gain.
"""

PARTS = {
    "breakdown": (
        "Cupcake, Figure 2a: compressing every tensor",
        """**Agrees.** Compression takes more than 60 ms with DGC and with EF-SignSGD, which is more than the link saves: both
are slower than no compression, and so is OneBit. The rate was fitted to FP32 here; the codec times were not.""",
    ),
    "cupcake": (
        "Cupcake, Figures 6 and 7: scaling factors",
        """Gains are Cupcake's, the greatest over four algorithms. **Agrees**: the order, with Cupcake first and HiPress nowhere
below GRACE; GRACE slower than FP32 on ResNet-50 but with Rand-k; for ResNet-50 the gain over FP32 on PCIe and over
HiPress at 25 Gb/s.

**Differs**: on PCIe HiPress comes much nearer to Cupcake than in the paper. Here it compares the times of every
tensor exactly, and a link of 17 Gb/s makes compression of all but small tensors pay; what threshold the authors'
HiPress used is not told. BERT's gains over FP32 are 1.7 and 3 times the paper's. Its step on one GPU is not told; a
longer one would hide more of FP32's exchange. So with OneBit HiPress is faster than FP32 on BERT here, and slower in
the paper.

gradwire's joint plan gains most on PCIe. The papers' all-gather brings the payloads of 7 others to each rank,
all-to-all and all-gather of parts about two, and decoding is less by as much.""",
    ),
    "fusion": (
        "Cupcake, Figure 9: rules of fusion",
        """**Agrees**: all three are far above layer-wise. **Differs**: the best fusion is no better than the tuned rules, not 12
and 18 % above them. With the published codec times no fusion can be: [how much any fusion can
gain](search_times.md#cupcake-figure-9-how-much-any-fusion-can-gain), also for ResNet-101. The best fusion is that of
the fusion problem, in which decodes delay nothing else; the simulator's steps differ from that by a percent.""",
    ),
    "table_1": (
        "ByteComp, Table 1: compression on GPUs by HiPress",
        """**Does not agree.** BERT's gain is five times the paper's, and LSTM gains where the paper's loses. Nothing but
published codec times, computation and links is simulated. What the real systems lose besides, such as copies, waits
for the host or slower links inside machines, is in none of them. LSTM's FP32, to which nothing was fitted, is 0.08
below the paper's.""",
    ),
    "benefit": (
        "ByteComp, Figure 9: what a codec on the GPU saves",
        """The time that a tensor keeps links busy without compression, less that with it, over the time of its codec. Payloads
are gathered between machines (HiTopKComm's option), and sums inside machines are not encoded.

**Agrees**: the ratio rises with the size. It stops rising at 64 MiB, where the constants of codecs and links no longer
count. A tensor of 64 KiB gains by Rand-k only.""",
    ),
    "throughput": (
        "ByteComp, Figures 11a, 12a, 12b: more machines",
        """Gains are ByteComp's at 64 GPUs. The text does not name a panel's algorithm, so all three are given; the picture has
one each. On one machine HiTopKComm is all-gather of payloads, as GRACE's.

**Agrees**: ByteComp is well above FP32, nowhere below HiTopKComm, and above both others on LSTM, where PCIe needs
compression too. **Differs**: these gains are about half the paper's, and for BERT and VGG16 HiPress is as good as
ByteComp, within 6 % up or down. Both decide tensor by tensor; ByteComp's search is greedy, and cut short for BERT
(one look a tensor). For VGG16 it gains 150 % over FP32 instead of 269 %.

gradwire's joint plan is ahead most for BERT: it fuses tensors, and ByteComp's tree does not.""",
    ),
    "bound": (
        "ByteComp, Figure 13: distance to the upper bound",
        """How many per cent less throughput than with codecs that cost nothing, by the better of two searches, ByteComp's and
the joint one. The joint one fuses, so this bound is harder to reach than the paper's. The picture shows the worst of
three algorithms.

**Agrees** for VGG16 and LSTM with NVLink: ByteComp is within 5 % (paper: always within 10 %). **Differs** for
ResNet-50 and BERT, whose hundreds of tensors pay a latency and a codec call each, and over PCIe. gradwire's joint
plan is within 5 % with NVLink, and within 16 % over PCIe.""",
    ),
    "restricted": (
        "ByteComp, Figure 14: parts of the search space",
        """Scaling factors of VGG16 on 64 GPUs. There are no CPUs here, so the paper's "GPU compression" is full.

**Agrees** with NVLink: full is above all parts. **Differs**: inter-alltoall is above inter-allgather for all three
algorithms, where the paper found that they need different schemes; and over PCIe all-compressed is 2 % above full.
Algorithm 1 is greedy: it begins with nothing compressed and changes one tensor after the other, so it misses what
pays only when many change. That full "always outperforms" does not follow from it.""",
    ),
    "dear": (
        "DeAR, Table II: the greatest speed-up on 64 GPUs",
        """Equation 6: the computation that S^max at 10 Gb/s implies, and S^max at 100 Gb/s that follows from it. **Agrees** for
three models, which are compute-bound then. **Differs** for BERT-large: 51.8 does not follow from 100 Gb/s, but from
less than half, as ByteComp's network does above. DenseNet-201 is left out: its 64 at 10 Gb/s implies no time.""",
    ),
}
"""Title of each section, and the text about its table."""
PICTURES = ("breakdown", "cupcake", "fusion", "benefit", "throughput", "bound", "restricted")


def page(result: Mapping[str, Any]) -> str:
    """The whole page, from results/figures.json."""
    text = HEAD.format(date=result["made"]["date"], **result["fitted"])
    for name, (title, words) in PARTS.items():
        text += f"\n## {title}\n\n"
        if name in PICTURES:
            text += f"![{title}](pictures/{name}.png)\n\n"
        text += "\n".join(table(result[name]["columns"], result[name]["rows"], left=1)) + f"\n\n{words}\n"
    return text
