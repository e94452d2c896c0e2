"""Every compressor at the settings that benchmarks and docs show, with where it comes from and when to use it."""

from typing import NamedTuple

import gradwire as gw
from gradwire.core import Spec

__all__ = ["ENTRIES", "Entry"]


class Entry(NamedTuple):
    """One row of the page of compressors."""

    spec: Spec
    source: str
    use: str
    encode: float | None = None
    """The ratio to `copy_` that encoding is to reach at 4 and 64 MB; or, where `gbps`, GB/s. Of a ratio 0.6 with a residual or
    momentum, which is read and written as well."""
    gbps: bool = False
    trains: bool = True
    """Whether a model can be trained with it as it is, by the optimizer of the bench's jobs."""


QUANTISER, SIGN = 0.7, 1.0

ENTRIES: list[Entry] = [
    Entry(gw.Identity(), "none", "exact sums; fast networks"),
    Entry(gw.Cast("float16"), "PyTorch's fp16 hook", "twice fewer bytes with next to no loss; overflows beyond 65504"),
    Entry(gw.Cast("bfloat16"), "PyTorch's bf16 hook", "as float16, without overflow, with 8 times the error"),
    Entry(gw.FP8("e4m3"), "FP8 formats (Micikevicius et al. 2022)", "4 times fewer bytes, tiny loss", QUANTISER),
    Entry(gw.Int8(), "QSGD at 8 bits, nearest", "4 times fewer bytes, tiny loss", QUANTISER),
    Entry(gw.Natural(), "Horvath et al. 2019", "values over many powers of two, unbiased", QUANTISER),
    *(
        Entry(gw.QSGD(bits=bits), "QSGD (Alistarh et al. 2017); CGX section 3", use, QUANTISER)
        for bits, use in (
            (8, "unbiased at 4 times fewer bytes"),
            (6, "between 8 and 4 bits"),
            (4, "the usual choice: 1/7.8 of the bytes; the transformer's loss +0.1 % ([measured](measured.md#accuracy))"),
            (3, "fewer bytes than 4 bits; give it error feedback"),
            (2, "with error feedback, on very slow links"),
        )
    ),
    Entry(gw.QSGD(levels="exponential"), "NUQSGD (Ramezani-Kebrya et al. 2021)", "blocks with a few large values", QUANTISER),
    Entry(
        gw.ErrorFeedback(gw.QSGD(bits=2)),
        "QSGD with Karimireddy et al. 2019",
        "2 bits on two ranks; on more, four levels with weights lose less",
        QUANTISER,
    ),
    Entry(
        gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls")),
        "QSGD with a scale by least squares",
        "as above, without sending more than the gradient's energy",
        QUANTISER,
    ),
    Entry(
        gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd")),
        "Lloyd 1982; Max 1960",
        "four levels: less error for a fifth more bytes",
        QUANTISER,
    ),
    Entry(
        gw.ErrorFeedback(gw.QSGD(bits=2, scale="ls", levels="lloyd"), weights=0.98, warm_up_steps=20),
        "weights of elements ([decision 50](decisions/050-weights-of-elements.md))",
        "four levels, for elements of unlike sizes",
        QUANTISER,
    ),
    Entry(
        gw.ErrorFeedback(gw.QSGD(bits=3, scale="ls", levels="lloyd")),
        "Lloyd 1982; Max 1960",
        "eight levels: a third of the error of four",
        QUANTISER,
    ),
    Entry(
        gw.ErrorFeedback(gw.QSGD(bits=3, scale="ls", levels="lloyd"), weights=0.98, warm_up_steps=20),
        "weights of elements ([decision 50](decisions/050-weights-of-elements.md))",
        "eight levels, for elements of unlike sizes: what auto sends on 5 to 16 ranks",
        QUANTISER,
    ),
    Entry(gw.TernGrad(), "Wen et al. 2017", "2 bits, unbiased, noisy", QUANTISER),
    Entry(gw.TwoBit(), "MXNet; CD-SGD section 3", "2 bits with a residual of its own", QUANTISER),
    Entry(gw.SignSGD(), "Bernstein et al. 2018", "with learning rates for steps of size one", SIGN, trains=False),
    Entry(gw.Signum(), "Bernstein et al. 2018", "as SignSGD, less noise", SIGN, trains=False),
    Entry(gw.EFSignSGD(), "Karimireddy et al. 2019; Cupcake", "1 bit that learns", SIGN),
    Entry(gw.OneBit(), "Seide et al. 2014; Cupcake", "1 bit, two means a block", SIGN),
    Entry(gw.ErrorFeedback(gw.TopK(0.01)), "Aji and Heafield 2017; Cupcake", "very slow links, few ranks", 1.0, True),
    Entry(gw.ErrorFeedback(gw.BlockTopK(0.01)), "Top-k in blocks", "as Top-k, cheaper to find", 1.0, True),
    Entry(gw.ErrorFeedback(gw.Threshold(1e-3)), "Strom 2015", "gradients whose scale is known"),
    Entry(gw.ErrorFeedback(gw.RandomK(0.01)), "Stich et al. 2018; Cupcake", "cheapest to find, summed on the wire", SIGN),
    Entry(gw.DGC(0.01), "Lin et al. 2018; ByteComp, Cupcake", "Top-k with plain SGD", 1.0, True, trains=False),
    Entry(gw.PowerSGD(rank=4), "Vogels et al. 2019", "matrices; many ranks, as factors are summed on the wire", 1.3, True),
]
