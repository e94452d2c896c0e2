"""Compressors of FSDP2's modules: one spec for all, those of a policy by the names and sizes of modules, or chosen by auto."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from gradwire.auto import EARLIER_SPECS, AllRanks, Auto, ChosenSpecs, choose_alone, counted, is_auto, say
from gradwire.core import Plan, Spec, TensorInfo, fingerprint, show
from gradwire.errors import PlanError
from gradwire.exchange import info_of, warn_of_embeddings
from gradwire.integrations.pack_content import packed_embeddings
from gradwire.plan import Policy, Where
from gradwire.transport import Lanes

__all__ = ["WHOLE", "ModuleSpecs", "policy_for", "sharded_modules"]
WHOLE = ".parameters"
"""The end of the name of a module's parameters, which are one tensor in records."""
_ALL = 2**62
_WITH = " + "
"""Between the names of modules that `fully_shard` got in one list: FSDP2 sends them as one tensor."""


class ModuleSpecs:
    """The spec of each module's gradients.

    modules: `sharded_modules` of the model. plan: a spec, a policy whose rules match names and sizes of modules, or "auto".
    scheme: the scheme by which all gradients are reduced, and not gathered; None: both, by the scheme of the policy or as a
    policy without one chooses.
    """

    def __init__(self, modules: Mapping[str, Any], plan: Spec | Policy | str, scheme: str | None, accuracy: str | float) -> None:
        own = plan.scheme if isinstance(plan, Policy) else None
        if scheme is not None and own not in (None, "flat", scheme):
            raise PlanError(f"the policy's scheme is {own!r}, and reduce-scatters of FSDP2 travel by {scheme!r}. Leave it out.")
        self.plan, self._accuracy, self._scheme = plan, accuracy, scheme or own
        self.one_phase = scheme is not None
        """Whether gradients are reduced only, and not gathered."""
        self.chosen: ChosenSpecs | None = None
        """The choice of auto, made in the first backward."""
        self._specs: dict[str, Spec] = {}
        embeddings = packed_embeddings(modules)
        sizes = {name: _size_of(module) for name, module in modules.items()}
        self.infos = [TensorInfo(name, (n,), "float32", embedding=name in embeddings) for name, n in sizes.items() if n]
        if is_auto(plan, accuracy):
            return
        if isinstance(plan, (Policy, Spec)):
            given = Policy(default=plan) if isinstance(plan, Spec) else plan
            policy = _with_groups(msgspec.structs.replace(given, exempt_vectors=False), self.infos)
            made = policy.plan(self.infos)
            self._set({name: bucket.spec_of(name) for bucket in made.buckets for name in bucket.tensors})
            warn_of_embeddings(self.infos, made, policy)
        else:
            self._set({"model": plan})

    def __repr__(self) -> str:
        return f"{self.plan!r}, accuracy={self._accuracy!r}"

    def policy_of(self, module: str, buffer: Tensor, lanes: Lanes) -> Policy:
        """The policy of a module's buffer, of which this is a part. Collective where auto has not chosen yet."""
        if not self._specs:
            kind = info_of(module, buffer)
            infos = [msgspec.structs.replace(info, dtype=kind.dtype, device=kind.device) for info in self.infos]
            self.chosen = choose_alone(AllRanks(lanes, buffer.device), infos, self._accuracy, self._scheme)
            self._specs = self.chosen.specs
            if dist.get_rank() == 0:
                say(str(self.chosen))
        return policy_for(self._specs[module], self._scheme)

    @property
    def used(self) -> list[Spec]:
        """The specs of all modules; empty before auto has chosen."""
        return [*self._specs.values()]

    @property
    def wholes(self) -> list[TensorInfo]:
        return [msgspec.structs.replace(info, name=info.name + WHOLE) for info in self.infos]

    def plan_of_all(self, ranks: int, ranks_per_node: int | None) -> Plan:
        """The plan of all modules' gradients with a bucket for each, in the order of backward: for records."""
        infos = self.wholes[::-1]
        policies = [policy_for(self._specs[info.name.removesuffix(WHOLE)], self._scheme) for info in infos]
        buckets = [each.plan([info], ranks, ranks_per_node).buckets[0] for each, info in zip(policies, infos, strict=True)]
        launch = [(at, task) for at, bucket in enumerate(buckets) for task in bucket.link_tasks]
        return Plan(fingerprint=fingerprint(infos), buckets=tuple(buckets), launch=tuple(launch))

    def describe(self) -> str:
        """Words for what is compressed, without the end of the sentence."""
        if not self._specs:
            return "FSDP2's gradients: auto chooses in the first backward"
        return f"FSDP2's gradients: {counted(self._specs)}"

    def state(self) -> dict[str, str]:
        """Return the choice of auto, for `load`."""
        return (
            {name: policy_for(spec, self._scheme).to_json(None) for name, spec in self._specs.items()}
            if self.plan == "auto"
            else {}
        )

    def load(self, saved: Mapping[str, str]) -> None:
        """Go on with what auto chose when `state` was called. Raises ValueError for a choice that the accuracy does not allow."""
        if self.plan != "auto":
            return
        specs = {name: Policy.from_json(text).default for name, text in saved.items()}
        auto = Auto(self._accuracy, ("backward",), dist.get_world_size())
        for name, spec in specs.items():
            plan = policy_for(spec, self._scheme).plan([TensorInfo(name, (1,), "float32")])
            why = auto.refuses(plan, plan)
            if spec in EARLIER_SPECS and self._accuracy != "aggressive":  # nothing is chosen again here
                why = f"{spec!r}, which accuracy='aggressive' allowed in gradwire 0.3. Load the state with that accuracy."
            if why:
                raise ValueError(f"the state was saved when {name!r} was sent by what this call does not allow: {why}")
        self._specs = specs

    def _set(self, specs: dict[str, Any]) -> None:
        for spec in specs.values():
            if not isinstance(spec, Spec):
                raise PlanError(f"plan is {show(spec)}. In FSDP2 it is 'auto', a gw.Policy or one spec, such as gw.QSGD(bits=4).")
            if self.one_phase and spec.element_weights:
                raise PlanError(
                    f"plan is {spec!r}: weights of elements follow from whole means, and FSDP2 gives each rank a shard of them. "
                    "Leave weights out."
                )
            if self.one_phase and spec.encodes and not spec.granularity:
                raise PlanError(
                    f"plan is {spec!r}: it needs whole tensors, and FSDP2 gives each rank a shard of them. Take another one, "
                    "such as gw.QSGD(bits=4) or gw.DGC() without clip."
                )
            policy_for(spec, self._scheme)
        self._specs = specs


def sharded_modules(model: torch.nn.Module) -> dict[str, Any]:
    """The modules that `fully_shard` was called on, by name. Of those that it got in one list the first, by the names of all."""
    names: dict[Any, list[str]] = {}
    first: dict[Any, FSDPModule] = {}
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()  # of all modules of one call
            names.setdefault(state, []).append(name or "model")
            first.setdefault(state, module)
    return {_WITH.join(names[state]): module for state, module in first.items()}


def _with_groups(policy: Policy, infos: Sequence[TensorInfo]) -> Policy:
    """The policy with rules that match a group of modules, too, where they match a module of it. Raises PlanError for rules that
    give one group two specs."""
    of_groups: dict[str, dict[str, Spec]] = {info.name: {} for info in infos if _WITH in info.name}
    rules: list[tuple[str | Where, Spec]] = []
    for which, spec in policy.rules:
        where, matched = which if isinstance(which, Where) else Where(which), []
        for info in infos:
            names = info.name.split(_WITH) if info.name in of_groups else []
            if own := [name for name in names if where.matches(msgspec.structs.replace(info, name=name))]:
                of_groups[info.name] = dict.fromkeys(own, spec) | of_groups[info.name]
                matched.append(info.name)
        rules.append((msgspec.structs.replace(where, names="|".join([where.names, *matched])) if matched else which, spec))
    for group, specs in of_groups.items():
        found = [*specs.items()]
        if other := next((each for each in found if each[1] != found[0][1]), None):
            name, spec = found[0]
            raise PlanError(
                f"rules give {spec!r} for {name!r} and {other[1]!r} for {other[0]!r}. fully_shard got both in one list, "
                f"so FSDP2 sends them as one tensor. Begin with one rule for all: ({group.replace(_WITH, '|')!r}, {spec!r})."
            )
    return msgspec.structs.replace(policy, rules=tuple(rules))


def policy_for(spec: Spec, scheme: str | None) -> Policy:
    """The policy of one buffer in one bucket. Raises PlanError for a spec that the scheme cannot carry."""
    made = Policy(default=spec, exempt_vectors=False, scheme=scheme, bucket_bytes=_ALL, edge_bytes=_ALL, chunk_bytes=0)
    made.plan([TensorInfo("model", (1,), "float32")])
    return made


def _size_of(module: torch.nn.Module) -> int:
    """The elements of the parameters that FSDP2 shards with this module, on all ranks together."""
    group = module._get_fsdp_state()._fsdp_param_group  # type: ignore[operator]
    return sum(each._orig_size.numel() for each in group.fsdp_params) if group is not None else 0
