"""`make fuzz` and `make fuzz-threads`: messages through rings in shared memory, under sanitizers.

    python tests/support/ring_fuzz.py address|thread [--seconds 60] [--ranks 3] [--seed 0]

Builds the kernels with -fsanitize=address,undefined or -fsanitize=thread, then runs itself with the sanitizer's library loaded
first. Ranks are threads of one process, and both ends of a ring have it at one address: so ThreadSanitizer sees the memory that
two processes share otherwise. In each round they run lists of messages and sums of any size in rings of any capacity; in some
rounds one breaks off. What arrives must be what was sent.
"""

import argparse
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from lane_fuzz import OPTIONS, REPORTS, sees_a_race
from sanitizers import run_again, use_library

if TYPE_CHECKING:
    from gradwire.transport import LinkError
    from gradwire.transport.operations import Operations

SANITIZERS = {
    "address": ("-fsanitize=address,undefined -fno-sanitize-recover=undefined", ["libasan.so", "libubsan.so"]),
    "thread": ("-fsanitize=thread", ["libtsan.so"]),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sanitizer", choices=SANITIZERS)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if use_library():
        works = options.sanitizer == "address" or told_of_a_race()
        return 0 if works and fuzz(options.seconds, options.ranks, options.seed) else 1
    flags, libraries = SANITIZERS[options.sanitizer]
    with tempfile.TemporaryDirectory() as folder:
        inside = {
            "ASAN_OPTIONS": "detect_leaks=0",
            "TSAN_OPTIONS": f"{OPTIONS}:log_path={folder}/report",
            REPORTS: f"{folder}/report",
        }
        code = run_again(flags, libraries, inside)
        reports = [part for path in Path(folder).iterdir() for part in path.read_text().split("=" * 18 + "\n")]
    ours = [report for report in reports if "_native.so" in report]
    print(f"{len(ours)} reports of the sanitizer have the kernels in them, and {len(reports) - len(ours)} have not")
    print("\n".join(dict.fromkeys(ours)))
    return code or bool(ours)


def told_of_a_race() -> bool:
    """Asked in another process: it throws its report away, and with that all later ones of its own."""
    if (pid := os.fork()) == 0:
        os._exit(0 if sees_a_race() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def fuzz(seconds: float, ranks: int, seed: int) -> bool:
    """Return whether all messages arrived as they were sent."""
    began, rounds, broken = time.monotonic(), 0, 0
    while time.monotonic() - began < seconds:
        ended = one_round(random.Random(seed + rounds), ranks)
        rounds, broken = rounds + 1, broken + (ended == "broken off")
        if ended not in ("", "broken off"):
            print(f"round {rounds - 1}: {ended}", file=sys.stderr)
            return False
    print(f"{rounds} rounds of {ranks} ranks, {broken} of them broken off, in {time.monotonic() - began:.0f} s")
    return True


def one_round(chance: random.Random, ranks: int) -> str:
    """Some lists on all ranks. What went wrong, in words; '' for nothing."""
    import torch

    from gradwire.collectives.wire_sum import WireSum, even_bounds
    from gradwire.transport import Grid
    from gradwire.transport.operations import Operations

    def messages(number: int) -> None:
        """Every rank sends to every other: bytes, and elements that are added."""
        dtype = chance.choice([torch.float32, torch.bfloat16, torch.float16])
        counts = [[chance.choice([1, 5, 1000, chance.randrange(1, 60_000)]) for _ in range(ranks)] for _ in range(ranks)]
        made = [Operations() for _ in range(ranks)]
        for rank, operations in enumerate(made):
            others = [(rank + step) % ranks for step in range(1, ranks)]
            for to in others:
                operations.send(to, torch.full((counts[rank][to],), 1 + rank, dtype=torch.uint8), number)
                operations.send(to, torch.full((counts[to][rank],), 1.0 + rank, dtype=dtype), number + 1)
            for source in others:
                arrived = torch.zeros(counts[source][rank], dtype=torch.uint8)
                total = torch.ones(counts[rank][source])
                operations.receive(source, arrived, number)
                operations.receive_elements(source, total, number + 1, add=True, dtype=dtype)
                expected.append((arrived, 1 + source))
                expected.append((total, 2 + source))
            operations.flush()
        lists.append(made)

    def sums(number: int) -> None:
        flats = [torch.full((chance_of_sums,), 1.0 + rank) for rank in range(ranks)]
        expected.extend((flat, ranks * (ranks + 1) / 2) for flat in flats)
        nodes, others = (
            chance.choice([1, ranks]),
            [[other for other in range(ranks) if other != rank] for rank in range(ranks)],
        )
        sums = [
            WireSum(flat, Grid.even(nodes, ranks // nodes, rank), even_bounds(chance_of_sums, ranks))
            for rank, flat in enumerate(flats)
        ]
        lists.append([each.operations((0, 1), number, others[rank]) for rank, each in enumerate(sums)])

    expected: list[tuple[torch.Tensor, float]] = []
    lists: list[list[Operations]] = []
    chance_of_sums = chance.choice([1, 100, chance.randrange(1, 300_000)])
    for number in range(chance.randint(1, 6)):
        chance.choice([messages, sums])(3 * number)
    broken_off, errors = run_lists(chance, ranks, lists)
    if broken_off:
        return "broken off"
    wrong = [tensor for tensor, value in expected if not (tensor == value).all()]
    return "; ".join(map(str, [*errors, *(f"{tensor.numel()} elements are wrong" for tensor in wrong)]))


def run_lists(chance: random.Random, ranks: int, lists: "list[list[Operations]]") -> "tuple[bool, list[LinkError]]":
    """Run the lists on all ranks, and break the connection in one of five runs. Whether that caused errors, and the errors."""
    from fake_links import wires

    from gradwire.transport import LinkError, Meter

    connected = wires(ranks, 20.0, shared=True, capacity=chance.choice([64, 128, 4096, 40_000, 2**20]), mapped_once=True)
    errors: list[LinkError] = []

    def live(rank: int) -> None:
        try:
            for made in lists:
                connected[rank].run(made[rank], Meter())
        except LinkError as error:
            errors.append(error)
            connected[rank].shut_down()  # as a lane does: the other ranks do not wait for the timeout

    threads = [threading.Thread(target=live, args=(rank,)) for rank in range(ranks)]
    breaks = chance.random() < 0.2
    for thread in threads:
        thread.start()
    if breaks:
        time.sleep(chance.random() * 0.02)
        connected[0].shut_down()
    for thread in threads:
        thread.join(60)
    if any(thread.is_alive() for thread in threads):
        print("a rank is stuck", file=sys.stderr, flush=True)
        os._exit(1)  # they use memory that would go
    for wire in connected:
        wire.close()
    return breaks and bool(errors), errors


if __name__ == "__main__":
    sys.exit(main())
