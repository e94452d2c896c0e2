"""The rank of `python -m benchmarks frameworks`: the arms of one cell train in turns, in one process.

    python -m benchmarks.framework_arms CELL ROUNDS

Each arm is a whole training of its framework, in a thread of its own. One arm at a time has the turn, on all ranks the same, so
that collectives of different arms never mix: from the making of its model to the end of its first turn, then for TURN_STEPS steps
in each round, and in the last round until its framework has ended. The order of the arms rotates from round to round.
"""

import gc
import json
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import gradwire as gw
from gradwire.bench.jobs import make_job
from gradwire.bench.ranks import Ranks, sent_by_interface

WARMUP_STEPS, DECIDING_STEPS, TURN_STEPS = 4, 20, 3
"""Steps of an arm's first turn, which do not count: usually, and where the arm chooses its plan. And the steps of other turns."""
BATCH, LENGTH, WORDS = 4, 64, 4608
PLAN = gw.Policy(default=gw.ErrorFeedback(gw.QSGD(bits=2)))
"""The plan that auto chooses on such links in the class "safe"."""
ROUNDED = "auto, parameters in 8 bits"
Make = Callable[[], Any]
Arm = Callable[[int, Callable[[], None]], None]
"""A training of so many steps, which calls the function after each step."""


class Turns:
    """The arm that has the turn, and the times and bytes of the steps that count.

    warmup: arms with another number of steps in their first turn than WARMUP_STEPS.
    """

    def __init__(self, names: Sequence[str], rounds: int, ranks: Ranks, warmup: Mapping[str, int] = MappingProxyType({})) -> None:
        self.names, self.ranks = names, ranks
        self.us: dict[str, list[float]] = {name: [] for name in names}
        self.sent: dict[str, int] = dict.fromkeys(names, 0)
        self._turns = [(name, warmup.get(name, WARMUP_STEPS)) for name in names]
        self.counted = rounds * TURN_STEPS
        self.steps = {name: first + self.counted for name, first in self._turns}
        for at in range(rounds):
            first = at % len(names)
            self._turns += [(name, TURN_STEPS) for name in (*names[first:], *names[:first])]
        self._lefts = dict(self.steps)
        self._at, self._left = 0, 0
        self._moved = threading.Condition()

    def begin(self, name: str) -> None:
        """Wait for the arm's turn."""
        with self._moved:
            self._moved.wait_for(lambda: self._turns[self._at][0] == name)
        self._left = self._turns[self._at][1]
        self.ranks.meet()
        self._sent, self._began = sent_by_interface(), time.perf_counter()

    def step(self, name: str) -> None:
        """A step has ended. Returns when the next one may begin."""
        now = time.perf_counter()
        self.us[name].append((now - self._began) * 1e6)
        self._left, self._lefts[name] = self._left - 1, self._lefts[name] - 1
        if self._left == 0:
            self.ranks.meet()
            if self._at >= len(self.names):
                self.sent[name] += sent_by_interface() - self._sent
            if self._lefts[name]:
                self.end()
                self.begin(name)
        self._began = time.perf_counter()

    def end(self) -> None:
        """Give the turn to the next arm."""
        with self._moved:
            self._at = min(self._at + 1, len(self._turns) - 1)
            self._moved.notify_all()

    def run(self, arms: dict[str, Arm]) -> None:
        """All arms to their ends. An arm that fails ends the process."""
        threads = [threading.Thread(target=self._train, args=each) for each in arms.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _train(self, name: str, arm: Arm) -> None:
        try:
            self.begin(name)
            torch.manual_seed(0)
            arm(self.steps[name], partial(self.step, name))
            gc.collect()  # the lanes of a hook end here, in the arm's turn
            assert self._lefts[name] == 0, f"{name} made {self.steps[name] - self._lefts[name]} of {self.steps[name]} steps"
            self.end()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # other threads wait for a turn that never comes


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """Random tokens, the same at every start."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, at: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(WORDS, (LENGTH,), generator=torch.Generator().manual_seed(at))
        return {"input_ids": tokens, "labels": tokens}


def gpt2() -> Any:
    """7.5 million parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=256, n_layer=8, n_head=8, **ends))


def blocks_of(model: Any) -> Sequence[nn.Module]:
    """The layers that are sharded, or compiled, one by one."""
    blocks: Sequence[nn.Module] = model.transformer.h if hasattr(model, "transformer") else model.blocks
    return blocks


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


def transformers(way: str, steps: int, stepped: Callable[[], None], make: Make = gpt2) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from gradwire.integrations.transformers import use

    class Stepped(TrainerCallback):
        def on_step_end(self, *arguments: Any, **named: Any) -> None:
            stepped()

    with tempfile.TemporaryDirectory() as folder:
        quiet = {"report_to": [], "save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True}
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, use_cpu=True, learning_rate=1e-4, **quiet
        )
        trainer = Trainer(make(), arguments, train_dataset=Tokens(), callbacks=[Stepped()])
        if way == "gradwire":
            use(trainer, plan=PLAN)
        elif way == "floor":
            trainer.accelerator.prepare_model = partial(trainer.accelerator.prepare_model, evaluation_mode=True)
        trainer.train()


def accelerate(way: str, steps: int, stepped: Callable[[], None], make: Make = gpt2) -> None:
    from accelerate import Accelerator

    from gradwire.integrations.accelerate import prepare

    accelerator, model = Accelerator(cpu=True), make()
    objects = model, adamw(model), DataLoader(Tokens(), batch_size=BATCH)
    if way == "gradwire":
        model, optimizer, loader = prepare(accelerator, *objects, plan=PLAN)
    else:
        if way == "floor":
            accelerator.prepare_model = partial(accelerator.prepare_model, evaluation_mode=True)
        model, optimizer, loader = accelerator.prepare(*objects)
    model.train()
    for _, batch in zip(range(steps), loader, strict=False):
        accelerator.backward(model(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()
        stepped()


def lightning(way: str, steps: int, stepped: Callable[[], None], make: Make = gpt2) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from gradwire.integrations.lightning import GradwireStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def training_step(self, batch: Any, at: int) -> torch.Tensor:
            loss: torch.Tensor = self.net(**batch).loss
            return loss

        def on_train_batch_end(self, *arguments: Any) -> None:
            stepped()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    class Floor(DDPStrategy):
        def configure_ddp(self) -> None:
            """Nothing is wrapped, so gradients stay as they are."""

    strategy = {"ddp": DDPStrategy, "floor": Floor, "gradwire": partial(GradwireStrategy, plan=PLAN)}[way]()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    sizes = {"devices": int(os.environ["LOCAL_WORLD_SIZE"]), "num_nodes": int(os.environ["GROUP_WORLD_SIZE"])}
    trainer = lightning.Trainer(accelerator="cpu", strategy=strategy, max_steps=steps, **sizes, **quiet)
    trainer.fit(Module(), DataLoader(Tokens(), batch_size=BATCH))


def hook(way: str, steps: int, stepped: Callable[[], None], make: Make = gpt2, job: str = "") -> None:
    """job: the bench's job that trains instead of a model that `make` returns."""
    model = make_job(job).make_model(0) if job else make()
    optimizer, trained, decided = adamw(model), model, None  # type: Any, Any, Any
    if way == "ddp":
        trained = DistributedDataParallel(model)
    elif way == "hook":
        trained = DistributedDataParallel(model, bucket_cap_mb_list=gw.bucket_sizes(model, PLAN))
        trained.register_comm_hook(gw.DDPState(PLAN), gw.ddp_hook)
    elif way == "auto hook":
        trained, decided = DistributedDataParallel(model, bucket_cap_mb=1, gradient_as_bucket_view=True), gw.DDPState()
        trained.register_comm_hook(decided, gw.ddp_hook)
    elif way in ("parallelize", "auto"):
        decided = gw.parallelize(model, optimizer, plan="auto" if way == "auto" else PLAN)
    _loop(_losses(trained, job), optimizer, steps, stepped)
    if decided is not None and decided.decision is not None and dist.get_rank() == 0:
        print(json.dumps({f"decision of {way}": str(decided.decision)}), flush=True)
    if isinstance(decided, gw.Handle):
        decided.detach()


def sharded(way: str, steps: int, stepped: Callable[[], None], make: Make = gpt2) -> None:
    from torch.distributed.fsdp import fully_shard

    from gradwire.integrations import fsdp2

    model, exchanges = make(), None
    for module in (*blocks_of(model), model) if way != "floor" else ():
        fully_shard(module)
    plans: dict[str, Any] = {"4 bits": gw.QSGD(bits=4), "2 bits": gw.ErrorFeedback(gw.QSGD(bits=2))}
    if way != "floor" and way != "native":
        rounded = gw.QSGD(bits=8) if way == ROUNDED else None
        exchanges = fsdp2.compress(model, plans.get(way, "auto"), parameters=rounded)
    _loop(_losses(model), adamw(model), steps, stepped)
    if exchanges is not None:
        exchanges.close()


def hsdp(way: str, steps: int, stepped: Callable[[], None]) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from gradwire.integrations import fsdp2

    size = dist.get_world_size()
    grid = (size, 1) if size == 2 else (size // 2, 2)
    mesh = init_device_mesh("cpu", grid, mesh_dim_names=("between", "inside"))
    model, exchanges = gpt2(), None
    shards = mesh if way == "native" else mesh["inside"]
    for block in blocks_of(model):
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    if way in ("gradwire", "auto"):
        exchanges = fsdp2.replicate(model, mesh["between"].get_group(), "auto" if way == "auto" else gw.QSGD(bits=4))
    _loop(_losses(model), adamw(model), steps, stepped)
    if exchanges is not None:
        exchanges.close()


def _losses(model: nn.Module, job: str = "") -> Iterator[torch.Tensor]:
    """The losses of this rank's batches."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if job:
        given = make_job(job)
        for step in range(len(Tokens())):
            yield given.loss(model, given.batch(rank, world_size, step))
        return
    # the ranks of a node share its batch, as they share its processors
    batch_size = BATCH // int(os.environ["LOCAL_WORLD_SIZE"])
    for batch in DataLoader(Tokens(), batch_size=batch_size, sampler=range(rank, len(Tokens()), world_size)):
        yield model(**batch).loss


def _loop(losses: Iterator[torch.Tensor], optimizer: torch.optim.Optimizer, steps: int, stepped: Callable[[], None]) -> None:
    for _ in range(steps):
        next(losses).backward()
        optimizer.step()
        optimizer.zero_grad()
        stepped()


class Cell(NamedTuple):
    """Arms that train one job over one link, in so many rounds of turns."""

    train: Callable[[str, int, Callable[[], None]], None]
    ways: Sequence[str]
    link: str = "200mbit"
    rounds: int = 10
    deciding: Sequence[str] = ()
    """Arms whose first turn has DECIDING_STEPS steps."""


WHOLE = ("floor", "ddp", "gradwire")
AUTO_JOBS = {"gpt2": "", "transformer": "transformer"}
AUTO_ROUNDS = {"100mbit": 8, "200mbit": 14, "1000mbit": 28, "unlimited": 28}
"""Rounds of the cells over each link: a cell takes at most 2.5 minutes."""
CELLS = {
    "transformers": Cell(transformers, WHOLE),
    "accelerate": Cell(accelerate, WHOLE),
    "lightning": Cell(lightning, WHOLE),
    "hook": Cell(hook, ("floor", "ddp", "hook", "parallelize")),
    "fsdp2": Cell(sharded, ("floor", "native", "4 bits", "2 bits", "auto", ROUNDED)),
    "hsdp": Cell(hsdp, ("floor", "native", "gradwire", "auto")),
} | {
    f"auto-{name}-{link}": Cell(
        partial(hook, job=job), ("floor", "ddp", "auto hook", "auto"), link, rounds, deciding=("auto hook", "auto")
    )
    for name, job in AUTO_JOBS.items()
    for link, rounds in AUTO_ROUNDS.items()
}


def measure(name: str, cell: Cell, rounds: int) -> None:
    """Train all arms of a cell on this rank. Rank 0 prints the steps and bytes that count, and the process ends."""
    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TORCHELASTIC_RUN_ID": "benchmarks"}
    ranks = Ranks(300.0, communicating=True)
    ways = cell.ways
    turns = Turns(ways, rounds, ranks, dict.fromkeys(cell.deciding, DECIDING_STEPS))
    turns.run({way: partial(cell.train, way) for way in ways})
    steps = ranks.gather(turns.us)
    sent = ranks.gather(turns.sent)
    if ranks.rank == 0:
        mean = {way: [sum(us) / len(us) for us in zip(*(each[way] for each in steps), strict=True)] for way in ways}
        counted = {way: us[-turns.counted :] for way, us in mean.items()}
        bytes_a_step = {way: sent[0][way] / len(counted[way]) for way in ways}
        print(json.dumps({"cell": name, "step_us": counted, "sent": bytes_a_step}), flush=True)
    ranks.close()
    os._exit(0)  # an ordinary exit aborts now and then in C++, after all is measured, where the DDP hook was used


if __name__ == "__main__":
    measure(sys.argv[1], CELLS[sys.argv[1]], int(sys.argv[2]))
