"""Jobs of the papers' evaluations that nobody published a profile of, made by scaling a published one.

Their names say so. Shapes and numbers of tensors are the models' own. Times of tensors are those of tensors of the published
profile; `gpt2` has one free factor, the time of a whole backward. UGATIT is left out: no published profile is like it.
"""

import msgspec

from gradwire.core import Profile, TensorProfile
from gradwire.errors import PlanError

__all__ = ["gpt2", "resnet101"]

_MORE_BLOCKS = 17
"""Blocks of the third stage that ResNet-101 has beyond ResNet-50's."""
_LAYERS, _WIDTH = 12, 768


def resnet101(resnet50: Profile) -> Profile:
    """ResNet-101 from the profile of ResNet-50: 17 more blocks in the third stage, each with the times of its block 1.

    Raises PlanError if the profile has no such block of nine tensors.
    """
    block = [tensor for tensor in resnet50.tensors if tensor.name.startswith("layer3.1.")]
    if len(block) != 9:
        raise PlanError(
            f"the profile of {resnet50.model} has {len(block)} tensors named layer3.1.*, and a block of ResNet-50 has 9. Give "
            "the published profile of ResNet-50."
        )
    before = next(place for place, tensor in enumerate(resnet50.tensors) if tensor is block[0])
    more = [
        msgspec.structs.replace(tensor, name=f"layer3.{number}.{tensor.name.removeprefix('layer3.1.')}")
        for number in range(5 + _MORE_BLOCKS, 5, -1)
        for tensor in block
    ]
    tensors = (*resnet50.tensors[:before], *more, *resnet50.tensors[before:])
    return msgspec.structs.replace(resnet50, model="ResNet-101, made by scaling", tensors=tensors)


def gpt2(bert: Profile, backward_us: float) -> Profile:
    """GPT-2 (124M) from the profile of BERT-base, whose layers have the same width: 148 tensors, `backward_us` in all.

    A matrix of a layer takes what BERT's matrices take for an element on average; vectors and embeddings take what BERT's word
    embeddings take. Then all are stretched alike. Forward takes the same part of backward as in `bert`.

    Raises PlanError if the profile has no word embeddings or no matrices of a layer.
    """
    layers = [t for t in bert.tensors if ".layer." in t.name and t.numel >= _WIDTH * _WIDTH]
    words = next((t for t in bert.tensors if t.name.endswith("word_embeddings.weight")), None)
    if not layers or words is None:
        raise PlanError(
            f"the profile of {bert.model} has {len(layers)} matrices of layers and {'no' if words is None else 'its'} word "
            "embeddings: GPT-2 is scaled from both. Give the published profile of BERT-base."
        )
    dense_us = sum(t.backward_us for t in layers) / sum(t.numel for t in layers)
    lookup_us = words.backward_us / words.numel
    rows = [
        (name, numel, numel * (dense_us if numel >= _WIDTH * _WIDTH and name.startswith("h.") else lookup_us))
        for name, numel in _gpt2_tensors()
    ]
    stretch = backward_us / sum(us for _, _, us in rows)
    forward = sum(t.forward_us or 0.0 for t in bert.tensors) / sum(t.backward_us for t in bert.tensors)
    tensors = tuple(
        TensorProfile(name=name, shape=(numel,), dtype="float32", backward_us=stretch * us, forward_us=forward * stretch * us)
        for name, numel, us in rows
    )
    return msgspec.structs.replace(bert, model="GPT-2, made by scaling", tensors=tensors)


def _gpt2_tensors() -> list[tuple[str, int]]:
    """Names and elements in gradient-ready order; the output layer shares the word embeddings, which are ready last."""
    width = _WIDTH
    tensors = [("ln_f.weight", width), ("ln_f.bias", width)]
    for layer in reversed(range(_LAYERS)):
        for name, rows, columns in (
            ("mlp.c_proj", 4 * width, width),
            ("mlp.c_fc", width, 4 * width),
            ("ln_2", 1, width),
            ("attn.c_proj", width, width),
            ("attn.c_attn", width, 3 * width),
            ("ln_1", 1, width),
        ):
            tensors += [(f"h.{layer}.{name}.bias", columns), (f"h.{layer}.{name}.weight", rows * columns)]
    return [*tensors, ("wpe.weight", 1024 * width), ("wte.weight", 50257 * width)]
