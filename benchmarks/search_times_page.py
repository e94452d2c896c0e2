"""The text of docs/search_times.md: tables of the results and the published numbers."""

from collections.abc import Mapping
from typing import Any

from benchmarks.markdown import table

HEAD = """# The papers' search times, and more of their figures

What Cupcake's and ByteComp's papers tell of their searches, of time to accuracy and of the distance to the best step, made
again with gradwire's planner and simulator. Search times are CPU time of one thread ({cpu}). Everything else is simulated
from the profiles and codec times that ByteComp's authors published. Made on {date} by the command below; do not edit.

```
python -m benchmarks search_times --data DIR
```

DIR and what is assumed are those of [the other figures](figures.md). The two fitted rates are {cupcake_pcie_gbps:.1f} Gb/s (PCIe)
and {nvlink_inter_gbps:.1f} Gb/s (Ethernet).

## Jobs made by scaling

Nobody published profiles of ResNet-101, GPT-2 and UGATIT. Two of them are made from published ones, and are named so:

- **ResNet-101 (scaled)** is ResNet-50's profile with 17 more blocks in the third stage, each with the times of its block 1.
  It has the model's own 314 tensors and 170 MB.
- **GPT-2 (scaled)** has the model's own 148 tensors and 475 MB. A matrix takes what BERT's matrices take for an element.
  Backward as a whole, {gpt2_backward_ms:.0f} ms, is fitted to the published 0.58 of FP32 (ByteComp, Table 1).
- **UGATIT** is left out: no published profile is like it.
- **BERT-base** has 199 tensors in its published profile, and 207 in both papers.
"""

PARTS = {
    "cupcake_table_1": (
        "Cupcake, Table 1: running time of Algorithm 1",
        """Each form of Algorithm 1 was stopped after the time that the table tells; in brackets, how much longer a step takes
than the best one with the plan it had then. All searches take the same straight lines through the published codec times.

**Agrees**: Algorithm 1 ends within seconds for ResNet-50, and without pruning 1 no search ends. **Differs**: pruning 2
saves little here, where the paper's saves a factor of 5 to 10. For ResNet-101 and BERT-base the search does not end in
the time allowed, and its plan is not the best one by then. How soon pruning 1 works depends on how near the first plans
come to the best one. The paper tells neither its costs nor its link's rate. An exact search needs less than a
millisecond for the same answer.""",
    ),
    "bytecomp_table_5": (
        "ByteComp, Table 5: time to select compression strategies",
        """The whole search simulates every option that could win. "One look" simulates one candidate for a tensor; its step is
compared with the whole search's.

**Agrees**: the whole search takes milliseconds, about as long as the paper's, and longest for ResNet-101; trying all
strategies is out of the question, for the LSTM's 10 tensors too. The paper's search is in Python and its tree has 4341
options; here the inner loop is C++, and codecs are on the GPU alone, which leaves 174. **Differs**: one look takes a
tenth of the time for hundreds of tensors, and its step is as good but for 1 %. Both searches are greedy, so the shorter
one sometimes ends with the better step.""",
    ),
    "bytecomp_table_6": (
        "ByteComp, Table 6: time to find the best offload",
        """The published time of CPUs has no published meaning. Here a codec takes 3 times as long on a CPU, and 6 codecs work at
once beside each GPU (48 cores for 8 GPUs). Both are assumed.

**Agrees**: after Algorithm 1 few tensors are left for VGG16 and the LSTM, where all subsets take no longer than the
search; for the others groups turn years into milliseconds. **Differs**: the paper says that BERT-base leaves a few
thousand products of counts. Here they are millions and more: the option is part of a group, and the whole search gives
tensors of equal size several options. Beyond 100,000 products the search improves one group after the other. What
offload gains is small (4 % at most), since a GPU's codecs are faster.""",
    ),
    "time_to_accuracy": (
        "Cupcake, Figure 8, and ByteComp, Figure 15: time to accuracy",
        """Nothing is trained here, and the accuracies are the papers'. At equal accuracy a run is faster by as much as a step is;
that ratio is compared.

**Agrees** over FP32 for ResNet-50, ResNet-101 (scaled) on 8 GPUs, and BERT-base on 64. **Differs**: HiPress is nearer to
Cupcake than in the paper, as in [its figures 6 and 7](figures.md). BERT-base on 8 GPUs gains more than in the paper; the
length of its step is not told. For ResNet-101 (scaled) on 64 GPUs ByteComp is slower than FP32, where the paper has
1.23: [why](#bytecomp-figure-15b-which-fp32-is-it-compared-with).
gradwire's joint plan fuses as well, and is ahead of FP32 by little, since there is little to gain.""",
    ),
    "cupcake_figure_9": (
        "Cupcake, Figure 9: how much any fusion can gain",
        """How much longer a step takes with the best bucket fusion and with the best even split than with the best of all
fusions: the paper's options and DGC on 8 GPUs, at a quarter of the fitted rate, at that rate, and at four times of it.
The best of all fusions is exact along the published codec times, unless the table says "at least".

**Differs, and no fusion can change that**: with these times the best fusion gains 0.7 % at most, where the paper has 12 and 18 %.
Each rule is tuned for each case, as in the paper, and the best of 6 thresholds, or of 31 even splits, is close to the best
step. It does not matter whether a bucket's payloads are decoded in one call or one by one. So the paper's gap comes from
costs that it does not publish, or from rules that were tuned less.""",
    ),
    "bytecomp_figure_15b": (
        "ByteComp, Figure 15b: which FP32 is it compared with",
        """ResNet-101 (scaled) with EF-SignSGD on 64 GPUs with NVLink, by the latency of a message. "Fused" is FP32 in buckets of
25 MB; "alone" sends every tensor alone, as ByteComp itself does. ByteComp is the whole search.

**Agrees** with the paper's 1.23 where FP32 fuses nothing, at the latencies that all figures here assume (10 and 30 us).
**Differs** where FP32 fuses: then ByteComp is slower, since it pays the latency of 314 tensors. Without latency there is
nothing to gain at all. The paper does not say whether its FP32, BytePS, fuses; its number fits one that does not.""",
    ),
    "bytecomp_scaled_models": (
        "ByteComp, Figures 11b and 12c: two models made by scaling",
        """Scaling factors of FP32, fused and alone, on 64 GPUs, and gains over FP32 that sends every tensor alone. "paper" is
what the text tells, mostly the greatest gain or loss. BytePS-Compress is missing, as in [the other
figures](figures.md).

**Differs**: the paper's 0.70 for ResNet-101 lies between FP32 that fuses nothing (0.55) and FP32 in buckets of 25 MB (0.96).
So gains over either one are not the paper's. Against buckets of 25 MB all systems that compress tensor by tensor are slower,
HiTopKComm by up to 42 % (paper: 54 %) and ByteComp, too. Against FP32 alone all are faster. For GPT-2 HiPress is as good as
ByteComp, as for BERT.""",
    ),
    "bytecomp_figure_13": (
        "ByteComp, Figure 13: distance to the upper bound, over all jobs",
        """How many per cent less throughput than the upper bound: the better of two searches, ByteComp's and the joint one, with
codecs that cost nothing. The paper tells of PCIe only that ByteComp is ahead of the others.

**Agrees**: ByteComp is ahead of HiTopKComm and, over PCIe, of HiPress. **Differs**: with NVLink ByteComp is within 10 % in
6 of 15 jobs, not in all. VGG16 and the LSTM are within 5 % ([by model](figures.md)); the models with hundreds of tensors
pay a latency and a codec call for each. This bound is harder to reach than the paper's, since the joint search fuses
tensors. gradwire's joint plan is within 10 % in all jobs with NVLink and in 9 of 15 over PCIe.""",
    ),
}
"""Title of each part, and the text about its table."""
PICTURES = {"bytecomp_figure_13": "distance"}


def search_times_page(result: Mapping[str, Any]) -> str:
    """The whole page, from results/search_times.json."""
    text = HEAD.format(**{name: result["made"][name] for name in ("date", "cpu")}, **result["fitted"])
    for name, (title, words) in PARTS.items():
        text += f"\n## {title}\n\n"
        if name in PICTURES:
            text += f"![{title}](pictures/{PICTURES[name]}.png)\n\n"
        text += "\n".join(table(result[name]["columns"], result[name]["rows"], left=1)) + f"\n\n{words}\n"
    return text
