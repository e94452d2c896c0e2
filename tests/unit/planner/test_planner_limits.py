"""Restricted searches, numbered cures, the offload's way, and a bound that stays below every plan."""

import json

import msgspec
import pytest
from every_method import EVERY_METHOD
from test_planner_joint import CODECS, SPEC, files, job_of, made_up, plan  # noqa: F401

from gradwire.core import Costs, EFSignSGD, Identity
from gradwire.errors import PlanError
from gradwire.plan.options import option_of
from gradwire.plan.schemes import RESTRICTED
from gradwire.planner.drafts import Limits, PlanningJob
from gradwire.planner.joint import every_start, joint
from gradwire.planner.methods import METHODS, explain_plan, make_plan
from gradwire.planner.sweep import check_some_may
from gradwire.sim.simulator import FS_PER_US


@pytest.mark.parametrize("restrict", [*RESTRICTED, "myopic"])
def test_restricted_searches_stay_in_their_part(restrict):
    limits = Limits(restrict=restrict, exempt_vectors=False)
    made = make_plan(job_of(1, 8, gbps=1.0, nodes=4, ranks_per_node=2, limits=limits), "bytecomp")
    used = [option_of(part.choice.option) for part in made.draft.parts]
    assert all(RESTRICTED.get(restrict, lambda option: True)(option) for option in used)
    free = make_plan(job_of(1, 8, gbps=1.0, nodes=4, ranks_per_node=2, limits=Limits(exempt_vectors=False)))
    assert made.plan.prediction.step_us >= free.plan.prediction.lower_bound_us
    if restrict in ("all-compressed", "myopic"):
        with pytest.raises(PlanError, match=r"1\. use the method bytecomp; 2\. "):
            make_plan(job_of(1, 8, nodes=4, ranks_per_node=2, limits=limits))
    else:
        job = job_of(1, 8, gbps=1.0, nodes=4, ranks_per_node=2, limits=limits)
        assert all(RESTRICTED[restrict](option_of(part.choice.option)) for part in joint(job).parts)


@pytest.mark.parametrize(
    ("limits", "cluster", "cures"),
    [
        (Limits(max_encodes=0), {"nodes": 2}, ["1. allow 1 encode (max_encodes, leaves ", "2. give no spec"]),
        (Limits(restrict="inter-allgather"), {"nodes": 2, "ranks_per_node": 1}, ["1. search without restrict", "2. plan for"]),
        (Limits(restrict="alltoall+alltoall", max_encodes=1), {"nodes": 2, "ranks_per_node": 2}, ["1. allow 2 encodes"]),
    ],
)  # fmt: skip
def test_cures_are_numbered_and_work(limits, cluster, cures):
    with pytest.raises(PlanError) as refused:
        job_of(0, 4, limits=limits, **cluster)
    assert all(cure in str(refused.value) for cure in cures), refused.value
    profile, links = made_up(0, 4, **cluster)
    assert PlanningJob(profile, links, Costs(codecs=CODECS), (), limits).plain  # give no spec
    if limits.max_encodes is not None:
        encodes = limits.max_encodes + 1
        assert job_of(0, 4, limits=Limits(max_encodes=encodes, restrict=limits.restrict), **cluster).coded


def test_too_little_memory_says_how_much_is_enough():
    with pytest.raises(PlanError, match=r"1\. allow (\d+) bytes") as refused:
        joint(job_of(2, 8, limits=Limits(memory_bytes=1)))
    enough = int(str(refused.value).split("allow ")[1].split(" ")[0])
    assert joint(job_of(2, 8, limits=Limits(memory_bytes=enough)))


@pytest.mark.usefixtures("papers_methods")
@pytest.mark.parametrize("method", [method for method in EVERY_METHOD if method != "joint"])
def test_every_method_keeps_to_the_memory_allowed_or_says_what_it_needs(method):
    with pytest.raises(PlanError, match=rf"the plan of {method} needs (\d+)") as refused:
        make_plan(job_of(2, 8, limits=Limits(memory_bytes=1)), method)
    needed = int(str(refused.value).split("needs ")[1].split(" ")[0])
    job = job_of(2, 8, limits=Limits(memory_bytes=needed))
    assert job.extra_bytes(make_plan(job, method).draft) <= needed


def test_what_must_not_be_compressed_and_must_be():
    limits = Limits(restrict="all-compressed")
    with pytest.raises(PlanError, match=r"must stay uncompressed.*1\. let all tensors be compressed"):
        make_plan(job_of(1, 8, limits=limits), "bytecomp")


def test_the_explanation_tells_how_the_offload_was_searched():
    few = make_plan(job_of(3, 4, gbps=1.0), "bytecomp")
    assert "all products of counts" in explain_plan(job_of(3, 4, gbps=1.0), few)
    restricted = Limits(restrict="inter-allgather")
    job = job_of(5, 90, gbps=1.0, nodes=4, ranks_per_node=2, limits=restricted)
    assert "coordinate descent" in explain_plan(job, make_plan(job, "bytecomp"))
    alone = job_of(3, 4, limits=Limits(devices=("gpu",)))
    assert "Nothing is offloaded" in explain_plan(alone, make_plan(alone, "bytecomp"))


def test_restrict_on_the_command_line(files):  # noqa: F811
    done = plan(files, "--spec", "qsgd4", "--method", "bytecomp", "--restrict", "inter-allgather", "--json")
    assert done.exit_code == 0, done.output
    buckets = json.loads(done.output)["buckets"]
    assert all(RESTRICTED["inter-allgather"](option_of(bucket["option"])) for bucket in buckets)
    assert "'fast'" in str(plan(files, "--restrict", "fast").exception)


@pytest.mark.parametrize("devices", ["", ","])
def test_no_device_at_all_is_refused(files, devices):  # noqa: F811
    told = plan(files, "--devices", devices).exception
    assert isinstance(told, PlanError) and "devices (--devices) is an empty list" in str(told)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--devices", "gpu,tpu"], "devices (--devices) is 'tpu': it must be one of gpu, cpu"),
        (["--devices", "cpu", "--restrict", "gpu"], "restrict (--restrict) is 'gpu', and devices (--devices) has cpu alone"),
        (["--devices", "gpu", "--restrict", "cpu"], "Add cpu to devices, or leave out one of the two."),
    ],
)
def test_devices_that_are_unknown_or_contradict_the_restriction_are_refused(files, more, told):  # noqa: F811
    refused = plan(files, *more).exception
    assert isinstance(refused, PlanError) and told in str(refused)
    assert plan(files, "--devices", "gpu,cpu", "--restrict", "gpu").exit_code == 0


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_is_below_the_bound(seed):
    job = job_of(seed, 9, gbps=[1.0, 10.0, 1000.0][seed % 3], limits=Limits(exempt_vectors=seed % 2 == 0))
    least_us = job.lower_bound_us()
    drafts = [*every_start(job, {}), joint(job)]
    assert min(job.step(draft) for draft in drafts) / FS_PER_US >= least_us


def test_the_bound_knows_the_last_tensors_own_tasks():
    """One tensor, ready at once: the step is its own tasks, and so is the bound but for 64 bytes of each payload."""
    job = job_of(0, 1, gbps=1.0, limits=Limits(exempt_vectors=False, devices=("gpu",)))
    assert job.lower_bound_us() == pytest.approx(job.step(joint(job)) / FS_PER_US, rel=0.02)


def test_times_that_fall_do_not_lift_the_bound():
    job = job_of(0, 2)
    falling = [msgspec.structs.replace(codec, encode=((4096, 900.0), (2**22, 1.0))) for codec in CODECS]
    odd = PlanningJob(job.profile, job.cluster, Costs(codecs=falling), [SPEC])
    size = odd.size((0,), SPEC)
    larger = size._replace(raw=2**22)
    for option in odd.coded[SPEC]:
        assert odd.pricer.sequence_us(option, SPEC, size) <= sum(odd.pricer.program(option, SPEC, larger).busy) / FS_PER_US
    assert odd.pricer.sequence_us(odd.plain[0].option, Identity(), size) > 0


def wide_job(limits, every=2):
    """A job in which every second tensor, or each `every`th, is float64, which compressors do not take."""
    given = job_of(1, 8, gbps=1.0, nodes=4, ranks_per_node=2)
    tensors = [
        msgspec.structs.replace(tensor, dtype="float64") if place % every == 0 else tensor
        for place, tensor in enumerate(given.profile.tensors)
    ]
    profile = msgspec.structs.replace(given.profile, tensors=tuple(tensors))
    return PlanningJob(profile, given.cluster, Costs(codecs=CODECS), [SPEC], limits)


@pytest.mark.parametrize("method", ["joint", "fusion", "grace", "hipress", "hitopkcomm", "bytecomp"])
def test_gradients_that_compressors_do_not_take_stay_uncompressed(method):
    job = wide_job(Limits(exempt_vectors=False))
    encoded = {name for bucket in make_plan(job, method).plan.buckets for name in bucket.compressed}
    assert encoded and not encoded & {tensor.name for tensor in job.profile.tensors if tensor.dtype == "float64"}


def test_a_job_of_gradients_that_compressors_do_not_take_is_refused():
    job = wide_job(Limits(exempt_vectors=False), every=1)
    with pytest.raises(PlanError, match=r"none of the 8 tensors .*gradients are float64.* take float32, bfloat16, float16"):
        check_some_may(job.profile, job.specs, job.limits)
    check_some_may(job.profile, (), job.limits)
    rows = [
        msgspec.structs.replace(tensor, dtype="float64" if len(tensor.shape) > 1 else "float32") for tensor in job.profile.tensors
    ]
    mixed = msgspec.structs.replace(job.profile, tensors=tuple(rows))
    with pytest.raises(PlanError, match=r"all but those of float64 have one dimension.*--all-tensors"):
        check_some_may(mixed, job.specs, Limits())
    with pytest.raises(PlanError, match=r"4 tensors must stay uncompressed\. What helps: search without restrict="):
        make_plan(wide_job(Limits(restrict="all-compressed", exempt_vectors=False)), "bytecomp")


def embedding_job(specs, limits=None, **cluster):
    """A job whose first and third matrices are embeddings, with the same times for each spec."""
    profile, links = made_up(3, 10, gbps=1.0, **({"nodes": 4, "ranks_per_node": 2} | cluster))
    matrices = [place for place, tensor in enumerate(profile.tensors) if len(tensor.shape) > 1]
    tensors = list(profile.tensors)
    for place in (matrices[0], matrices[2]):
        tensors[place] = msgspec.structs.replace(tensors[place], embedding=True)
    costs = [msgspec.structs.replace(codec, spec=spec) for codec in CODECS[:2] for spec in specs]
    return PlanningJob(msgspec.structs.replace(profile, tensors=tuple(tensors)), links, Costs(codecs=costs), specs, limits)


@pytest.mark.parametrize("method", [method for method in METHODS if method != "ddp"])
@pytest.mark.parametrize("specs", [[EFSignSGD()], [EFSignSGD(), SPEC]], ids=len)
def test_embeddings_travel_only_with_a_code_for_zero(method, specs):
    job = embedding_job(specs)
    made = make_plan(job, method)
    spec_of = {name: bucket.spec_of(name) for bucket in made.plan.buckets for name in bucket.tensors}
    assert all(spec_of[tensor.name].keeps_zeros for tensor in job.profile.tensors if tensor.embedding)
    assert len(specs) > 1 or not all(spec.keeps_zeros for spec in spec_of.values()), "others are sent so"
    assert "Embeddings (2) are not sent with EFSignSGD()" in explain_plan(job, made)


def test_all_tensors_compressed_begin_with_what_embeddings_may_have():
    limits = Limits(restrict="all-compressed", exempt_vectors=False)
    job = embedding_job([EFSignSGD(), SPEC], limits)
    assert all(part.choice.encodes for part in make_plan(job, "bytecomp").draft.parts)
    job.line.native = None
    assert all(part.choice.encodes for part in make_plan(job, "bytecomp").draft.parts)
    with pytest.raises(PlanError, match=r"2 tensors must stay uncompressed\. What helps: search without restrict="):
        make_plan(embedding_job([EFSignSGD()], limits), "bytecomp")
