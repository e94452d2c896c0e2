"""Judges one process by its facts, and lists the known traps of its torch. Pure: no communication."""

from collections.abc import Iterator

from gradwire.doctor.facts import Facts, is_loopback, nccl_choice
from gradwire.doctor.report import Finding, note, ok, problem


def machine_findings(facts: Facts) -> list[Finding]:
    """Return the findings about one rank alone."""
    found = [versions(facts)]
    if facts.torch_problem is None:
        found += [backends(facts), devices(facts), kernels(facts), threads(facts), timeout(facts)]
    found += [gloo(facts), *nccl(facts)]
    return found


def versions(facts: Facts) -> Finding:
    found = f"gradwire {facts.gradwire}, Python {facts.python}, torch {facts.torch or '(none)'}"
    if facts.torch_problem is not None:
        return problem(
            "versions",
            f"{found}; torch cannot be used: {facts.torch_problem}",
            "Everything but planning needs torch.",
            "Install torch for this Python and this machine: https://pytorch.org/get-started.",
        )
    if facts.torch_needed and _number(facts.torch or "") < _number(facts.torch_needed):
        return problem(
            "versions",
            f"{found}; this gradwire needs torch {facts.torch_needed} or newer",
            "Older versions lack functions that gradwire calls.",
            f"pip install --upgrade 'torch>={facts.torch_needed}'",
        )
    return ok("versions", found)


def backends(facts: Facts) -> Finding:
    there = [name for name, available in facts.backends.items() if available]
    absent = [name for name, available in facts.backends.items() if not available]
    without = f"; not {', '.join(absent)}" if absent else ""
    found = f"torch.distributed has {', '.join(there) or 'no backend'}{without}"
    if not facts.backends.get("gloo"):
        return problem(
            "backends",
            found,
            "init_process_group('gloo'), which starts jobs on CPUs, needs it. So does the doctor's own measurement of links.",
            "Install a torch wheel from https://pytorch.org/get-started, which has gloo.",
        )
    if facts.cuda_devices and not facts.backends.get("nccl"):
        return problem(
            "backends",
            found + f", though there are {len(facts.cuda_devices)} GPUs",
            "Gradients on GPUs would travel through the host's memory.",
            "Install a torch wheel for CUDA on Linux, which has NCCL.",
        )
    return ok("backends", found)


def devices(facts: Facts) -> Finding:
    if not facts.cuda_devices:
        built = f"torch is built for CUDA {facts.cuda}" if facts.cuda else "torch is built without CUDA"
        return ok("devices", f"CPU only: {built}, and no GPU is visible")
    names = dict.fromkeys(facts.cuda_devices)
    shown = ", ".join(f"{facts.cuda_devices.count(name)} x {name}" for name in names)
    triton = f"Triton {facts.triton}" if facts.triton else "no Triton"
    found = f"{shown}; CUDA {facts.cuda}, NCCL {facts.nccl or '(none)'}, {triton}"
    if facts.gpu_kernels:
        return ok("devices", found)
    return note(
        "devices",
        f"{found}; gradwire has no GPU kernels here",
        "Compression of gradients on GPUs runs on the plain-torch reference: the same bytes, but slow.",
        "Compare with plan=gw.Uniform(gw.Identity()) or gw.Uniform(gw.Cast('bfloat16')) before you use QSGD there.",
    )


def kernels(facts: Facts) -> Finding:
    speed = f"{facts.encode_gbytes_s:.3g} GB/s of float32" if facts.encode_gbytes_s else "an unknown speed"
    if facts.kernel_problem is None:
        found = f"C++ kernels at SIMD level {facts.kernel_level}; one thread encodes 4 bits at {speed}"
        return ok("kernels", found)
    return problem(
        "kernels",
        f"no C++ kernels: {facts.kernel_problem}; the plain-torch reference encodes 4 bits at {speed}",
        "The results are the same, but the C++ kernels run at about the speed of memory; without them compression "
        "may cost more time than it saves.",
        "Install a wheel of gradwire; or g++, and then gradwire from source: `pip install --force-reinstall --no-deps .` "
        "in a checkout. Until then plan=gw.Uniform(gw.Identity()).",
    )


def threads(facts: Facts) -> Finding:
    """Judge the cores of this node and the threads of its ranks."""
    cores = facts.cores if facts.core_quota is None else min(facts.cores, facts.core_quota)
    ranks = facts.local_world_size
    set_to = facts.variables.get("OMP_NUM_THREADS")
    found = (
        f"{facts.cores} core{'s' * (facts.cores != 1)} for {'this process' if ranks == 1 else f'{ranks} ranks on this node'}"
        + ("" if facts.core_quota is None else f", limited to {facts.core_quota:g} by the container")
        + f"; torch computes with {facts.threads} thread{'s' * (facts.threads != 1)} "
        + (f"(OMP_NUM_THREADS={set_to})" if set_to else "(OMP_NUM_THREADS is not set)")
    )
    if facts.threads * ranks > cores and facts.threads > 1:
        share = max(1, int(cores) // ranks)
        return note(
            "threads",
            found,
            f"{ranks * facts.threads} threads share {cores:g} cores, and a step takes as long as its slowest thread.",
            f"export OMP_NUM_THREADS={share} before the ranks start.",
        )
    if facts.threads == 1 and ranks * 2 <= cores:
        return note(
            "threads",
            found,
            f"Backward and forward of a CPU model use {ranks} of {cores:g} cores. torchrun sets OMP_NUM_THREADS to 1 "
            "when it starts several ranks and the variable is not set.",
            f"For a CPU model export OMP_NUM_THREADS={int(cores) // ranks}; on GPUs leave it.",
        )
    return ok("threads", found)


def timeout(facts: Facts) -> Finding:
    """Report the timeout after which other ranks notice a hanging rank."""
    if facts.gloo_timeout_s is None:
        return ok("timeout", "the default timeout of this torch is unknown")
    found = f"a group made without timeout= waits {_minutes(facts.gloo_timeout_s)} on gloo"
    if facts.nccl_timeout_s is not None:
        found += f", {_minutes(facts.nccl_timeout_s)} on NCCL"
    watchdog = " On NCCL the watchdog then ends the process." if facts.nccl_timeout_s is not None else ""
    return note(
        "timeout",
        found,
        "The other ranks notice a dead process at once. They notice a silent machine or a cut network after `silence_s`, by "
        "default a sixtieth of this timeout, but 7 to 30 s. They notice a hanging rank only near the end of this timeout; then "
        "gradwire names the bucket and the rank." + watchdog,
        "init_process_group(..., timeout=timedelta(minutes=5)): a little longer than the longest pause of one rank, such as "
        "saving or evaluating.",
    )


def gloo(facts: Facts) -> Finding:
    """Judge the address and the interface of gloo."""
    choice = facts.gloo
    if choice is None:
        return ok("interface", "unknown")
    usable = [each for each in facts.interfaces if each.usable_across_nodes]
    usable.sort(key=lambda each: not each.likely_across_nodes)
    if usable:
        names = ", ".join(f"{each.name} ({each.address})" for each in usable)
        cure = f"export GLOO_SOCKET_IFNAME={usable[0].name} on this node: the exact name of one of {names}."
    else:
        cure = "other machines cannot reach any interface of this node: give one an address, and set GLOO_SOCKET_IFNAME to it."
    if choice.problem is not None:
        return problem("interface", f"{choice.said_by}: {choice.problem}", "init_process_group('gloo') raises.", cure)
    found = f"gloo listens at {choice.address} on {choice.interface or 'an unknown interface'}: {choice.said_by}"
    if is_loopback(choice.address):
        return note(
            "interface",
            found,
            "Only ranks of this machine can connect. Ranks of other machines connect to their own loopback, and "
            "init_process_group fails with a timeout or 'Connection refused'.",
            f"For jobs of more than one machine: {cure}",
        )
    return ok("interface", found)


def nccl(facts: Facts) -> Iterator[Finding]:
    """Judge the interfaces that NCCL_SOCKET_IFNAME admits, on a node with GPUs."""
    variable = facts.variables.get("NCCL_SOCKET_IFNAME")
    if not facts.cuda_devices or not variable:
        return
    admitted = nccl_choice(variable, [each.name for each in facts.interfaces])
    if admitted:
        found = f"NCCL_SOCKET_IFNAME={variable} admits {', '.join(admitted)}"
        yield ok("NCCL interface", found)
        return
    yield problem(
        "NCCL interface",
        f"NCCL_SOCKET_IFNAME={variable} admits no interface of {', '.join(each.name for each in facts.interfaces)}",
        "NCCL cannot bootstrap without one.",
        "Set a prefix such as eth, a name such as =eth0, or exclusions such as ^docker,lo; or unset the variable.",
    )


def emulation_finding(problem: str | None) -> Finding:
    """Report whether clusters can be emulated here. problem: the result of `testbed.permission_problem()`."""
    if problem is None:
        return ok("testbed", "gradwire emulate, demo and bench can make network namespaces")
    return note(
        "testbed",
        f"no cluster can be emulated: {problem}",
        "gradwire emulate fails, and gradwire demo computes the speed on a slow link. Training is not affected.",
        "Run as root, start the container with --cap-add SYS_ADMIN --cap-add NET_ADMIN, or allow user namespaces: "
        "sysctl -w user.max_user_namespaces=10000.",
    )


_SEEN = "2.13"
"""The torch version, with gloo, on which each trap below was measured."""

_FOUND = {
    "gloo: threads": "two threads that submit collectives to one group get silently wrong sums",
    "new_group": "disjoint groups, each made by its own ranks only, are silently cross-wired",
    "gloo: dtypes": "int16 and float8 tensors are refused",
    "gloo: reduce_scatter": "reduce_scatter_tensor moves the bytes of an all_reduce and is slower than an all_reduce",
    "gloo: all_to_all": "all_to_all_single often runs in one direction at a time: up to twice the time on a slow link",
    "gloo: coalescing": "after a failed _coalescing_manager block, collectives of the group silently do nothing",
    "gloo: order": "collectives do not finish in the order in which they were issued",
    "DDP hooks on gloo": "the 8-bit hooks crash, the bf16 hook refuses gloo, PowerSGD has a race with several buckets",
    "torch.compile": "a model compiled as a whole gives all gradients near the end of backward: nothing overlaps",
    "torchrun": "with --max-restarts the first restart can fail to connect",
}
_CURES = {
    "gloo: threads": "Submit from one thread per group, in the same order on all ranks. gradwire uses its own groups.",
    "new_group": "Make every group on all ranks in the same order. With use_local_synchronization=True, all ranks of the group "
    "must have made equally many groups before.",
    "gloo: dtypes": "Send the tensors as uint8: tensor.view(torch.uint8).",
    "gloo: reduce_scatter": "Use all_to_all_single and a local sum.",
    "gloo: all_to_all": "Post receives (irecv) before sends (isend), as gradwire does.",
    "gloo: coalescing": "Do not use _coalescing_manager on gloo.",
    "gloo: order": "Wait for each async handle that you depend on, not only for the last one.",
    "DDP hooks on gloo": "Use the fp16 hook, or PowerSGD with a bucket_cap_mb that holds the whole model.",
    "torch.compile": "Compile block by block: for block in model.blocks: block.compile().",
    "torchrun": "Allow at least 3 restarts.",
}
TRAPS = tuple(note(topic, found, cure=_CURES[topic]) for topic, found in _FOUND.items())


def traps_of(torch: str | None) -> list[Finding]:
    """Return the traps of a torch version such as 2.13.0+cpu."""
    version = (torch or "").split(".")[:2]
    if len(version) < 2 or not all(map(str.isdigit, version)):
        return []
    if version == _SEEN.split("."):
        return list(TRAPS)
    found = f"torch {torch} was not examined; the known traps are those of {_SEEN}"
    return [note("unknown", found, cure="Run gradwire's tests with this torch before a long job.")]


def _number(version: str) -> tuple[int, ...]:
    """Return (2, 13) for 2.13.0+cpu."""
    words = version.split("+")[0].split(".")[:2]
    return tuple(int("".join(c for c in word if c.isdigit()) or 0) for word in words)


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:g} minutes" if seconds >= 60 else f"{seconds:g} s"
