"""CGX's front end: a backend of torch.distributed that quantises all-reduces of gradients.

Example; nothing else changes in a script with DDP::

    import gradwire.integrations.c10d
    dist.init_process_group("gradwire")

Importing this module registers the backend "gradwire". It quantises large all-reduces of floating-point tensors with `gw.QSGD`,
and exchanges them one after another on a thread while backward runs. Everything else is done by gloo for tensors on the CPU, and
by NCCL for tensors on a GPU, or by gloo where there is no NCCL.
"""

import warnings
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from glob import escape
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, _create_work_from_future  # type: ignore[attr-defined]
from torch.utils._pytree import tree_leaves

from gradwire._version import __version__
from gradwire.core import QSGD
from gradwire.exchange import Exchange, golden_digests, info_of
from gradwire.integrations.c10d_settings import SETTINGS, compare_ranks, exclude_layer, quantise, register_model, set_layer_bits
from gradwire.plan import Policy
from gradwire.transport import KERNELS, Lanes, Mark, Streams, agree

__all__ = ["exclude_layer", "quantise", "register_model", "set_layer_bits"]

_MOST_AT_ONCE, _MOST = 32, 256
"""After so many sizes the plain backend does one that is new, until it comes again. So many are remembered, each in about
twice its memory."""
_recent: deque[Any] = deque(maxlen=4)
"""The last works of plain backends, kept alive: a thread of gloo that freed one waits for Python's lock, which DDP holds when
it ends."""


class QuantisingGroup(dist.ProcessGroup):
    """A group whose ranks make the same all-reduces in the same order, as with gloo. An all-reduce raises DisagreementError
    on all ranks if bits or layers differ. Waiting raises RuntimeError, with gradwire's own words, if a rank died or stalled."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        kind = dist.ProcessGroup.BackendType.GLOO
        gloo: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._set_default_backend(kind)
        self._register_backend(torch.device("cpu"), kind, gloo)
        self._plain: dict[str, Any] = {"cpu": gloo, "cuda": gloo}
        """The backend of each type of device, which does what is not quantised."""
        if torch.cuda.is_available():
            if dist.is_nccl_available():
                kind, self._plain["cuda"] = dist.ProcessGroup.BackendType.NCCL, _nccl(store, rank, size, timeout)
            self._register_backend(torch.device("cuda"), kind, self._plain["cuda"])
        self._lanes: dict[torch.device, Lanes] = {}
        self._streams: dict[torch.device, Streams] = {}  # the worker's
        self._compared = -1
        """The changes of settings after which ranks compared them last."""
        self._exchanges: dict[tuple[Any, ...], Exchange | None] = {}  # the last used last; None: it was not quantised once
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="gradwire-c10d")

    def getBackendName(self) -> str:
        """The backend's name in DDP's logs and in torch's errors."""
        return "gradwire"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]
        """All-reduce plainly, or quantise in an exchange on the worker's thread. Returns a work that completes at the end. On a
        GPU, waiting for the work lets the current stream wait."""
        opts, tensor = opts or dist.AllreduceOptions(), tensors[0] if isinstance(tensors, (list, tuple)) else tensors
        if self._compared != SETTINGS.changes:
            self._compared = SETTINGS.changes
            compare_ranks(self)
        sums, means = (opts.reduceOp == each for each in (dist.ReduceOp.SUM, dist.ReduceOp.AVG))
        parts, factor = self._parts(tensor) if sums or means else None, self.size() if sums else 1
        exchange = self._exchange_of(parts) if parts else None
        if parts is None or exchange is None:
            return _plainly("allreduce")(self, tensors, opts)
        streams, failures = self._streams[tensor.device], list[Exception]()
        done = streams.future()
        self._worker.submit(_average, exchange, streams, streams.mark(), parts, tensor, factor, done, failures)
        return _create_work_from_future(done.then(partial(_result_of, failures)))

    def close(self) -> None:
        """End the threads. No quantised all-reduce may follow."""
        self._worker.shutdown()
        for lanes in self._lanes.values():
            lanes.stop()

    def plain_backend(self, arguments: Any) -> Any:
        """The backend that does a collective of these tensors plainly."""
        tensor = next((each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor)), None)
        return self._plain["cpu" if tensor is None else tensor.device.type]

    def _parts(self, tensor: torch.Tensor) -> dict[str, torch.Tensor] | None:
        """The tensor's layers by name, or the whole tensor; None if the tensor is not quantised."""
        quantised = tensor.dtype in (torch.float32, torch.bfloat16, torch.float16) and tensor.is_contiguous()
        if tensor.numel() < SETTINGS.min_numel or not quantised:
            return None
        if not SETTINGS.parameters:
            return {f"buffer of {tensor.numel()}": tensor.detach().view(-1)}
        parts, first = {}, tensor.data_ptr()
        for name, reference in SETTINGS.parameters.items():
            grad = parameter.grad if (parameter := reference()) is not None else None
            if grad is not None and 0 <= grad.data_ptr() - first < tensor.nbytes and grad.dtype == tensor.dtype:
                parts[name] = grad.detach()
        found = torch.tensor([sum(part.numel() for part in parts.values()) == tensor.numel()], dtype=torch.int32)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self)  # a rank that left a layer out does not find it
        if found.item():
            return parts
        warnings.warn(
            f"an all-reduce of {tensor.numel()} elements is not made of whole gradients of the registered model on all ranks, "
            "and stays uncompressed. If it is DDP's, set gradient_as_bucket_view=True.",
            stacklevel=2,
        )
        return None

    def _exchange_of(self, parts: Mapping[str, torch.Tensor]) -> Exchange | None:
        """The exchange of these layers. None, on all ranks, if there are many exchanges and this one may never come again."""
        of_parts = ((name, part.dtype, part.shape, SETTINGS.layers.get(name)) for name, part in parts.items())
        device = next(iter(parts.values())).device
        key = (SETTINGS.bits, bool(SETTINGS.parameters), device, *of_parts)
        again, exchange = key in self._exchanges, self._exchanges.pop(key, None)
        if exchange is None and (again or len(self._exchanges) < _MOST_AT_ONCE):
            rules = [(escape(name), SETTINGS.layers[name]) for name in parts if name in SETTINGS.layers]
            default = QSGD(bits=SETTINGS.bits, blocks="tensor" if SETTINGS.parameters else "bucket")
            policy = Policy(default=default, rules=rules, exempt_vectors=bool(SETTINGS.parameters))
            fresh = device not in self._lanes
            lanes = self._lanes[device] = self._lanes.get(device) or Lanes(self)
            plan = policy.plan([info_of(*each) for each in parts.items()], self.size(), lanes.group.grid.ranks_per_node_if_even)
            facts: dict[str, Any] = {"gradwire version": __version__, "all-reduce": [*parts], "plan": plan.digest()}
            facts[KERNELS] = golden_digests(plan, [part.dtype for part in parts.values()], device)
            if fresh:
                lanes.open(facts, device)
                self._streams[device] = lanes.data[0].link.streams.for_thread()
                self._worker.submit(self._streams[device].enter_thread)
            with lanes.told("all ranks to compare an all-reduce", 0):
                lanes.control.submit(lambda link: agree(link, facts, lanes.group.global_ranks)).result()
            exchange = Exchange.on(lanes, parts, plan, 0)
        self._exchanges[key] = exchange
        if len(self._exchanges) > _MOST:
            self._exchanges.pop(next(iter(self._exchanges)))
        return exchange


@torch.no_grad()
def _average(
    exchange: Exchange,
    streams: Streams,
    ready: Mark,
    parts: dict[str, torch.Tensor],
    tensor: torch.Tensor,
    factor: int,
    done: Any,
    failures: list[Exception],
) -> None:
    """Average the parts of a tensor, which the caller has written before the mark `ready`."""
    _recent.clear()
    try:
        with streams.decoding():
            streams.wait(ready)
            exchange.average_(parts)
            done.set_result([tensor.mul_(factor)])
    except Exception as error:
        failures.append(error)
        done.set_result([])


def _result_of(failures: list[Exception], done: Any) -> list[torch.Tensor]:
    """Raise the error of an exchange. An error raised here reaches DDP, which waits in C++; `Future.set_exception` does not."""
    for error in failures:
        raise error
    return [*done.value()]


def _nccl(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """NCCL between the ranks, whose communicators are made when the first collective needs them."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(PrefixStore("nccl", store), rank, size, options)


def _plainly(name: str) -> Callable[..., Any]:
    def call(group: QuantisingGroup, *arguments: Any, **named: Any) -> Any:
        _recent.append(work := getattr(group.plain_backend(arguments), name)(*arguments, **named))
        return work

    return call


# torch runs the methods that a Python subclass leaves out while it holds the interpreter's lock. A thread of gloo that frees a
# tensor waits for this lock while it holds gloo's own lock, for which the call waits: a deadlock
for _name in ("broadcast", "allgather", "reduce_scatter", "allreduce_coalesced", "barrier", "send", "recv"):
    setattr(QuantisingGroup, _name, _plainly(_name))

dist.Backend.register_backend("gradwire", QuantisingGroup, devices=["cpu", "cuda"])
