"""The pure formats: specs, profile, cluster, costs and plan. Strict, frozen, JSON in and out; no torch."""

from gradwire.core import entry_points, native, schedules, specs
from gradwire.core.checks import (
    DTYPE_BYTES,
    ENCODED_DTYPES,
    changed,
    error_words,
    flags,
    freeze,
    freeze_pairs,
    near,
    number,
    numbers,
    only_version,
    printable,
    show,
    text,
    under,
    unique,
    whole,
    wholes,
    word,
)
from gradwire.core.cluster import FAR_US, LANES, MOST_RANKS, Cluster, Link, lanes_over
from gradwire.core.collectives import (
    ALL_REDUCE,
    CODEC_TASKS,
    COLLECTIVES,
    LINK_TASKS,
    LINKS,
    ROUTINES,
    Collective,
    collective,
    collective_of,
    gathers_of,
    installed_collectives,
    is_link_word,
    pairs_ranks,
    uncompressed,
)
from gradwire.core.costs import CodecCosts, Costs, Points
from gradwire.core.entry_points import named
from gradwire.core.files import check_writable, make_folder, read_text, write_whole
from gradwire.core.launch import codes_on_cpu, lanes_of_pieces, launch_tasks, tasks_by_lane
from gradwire.core.memory_report import MemoryRecord
from gradwire.core.native import LIBRARY
from gradwire.core.payload import (
    RAW,
    SIGN_UNIT,
    code_bytes,
    coded_bytes,
    in_base_3,
    index_bytes,
    index_low_bits,
    kept_of,
    qsgd_bytes,
)
from gradwire.core.plan import RESIDUAL_DTYPES, Bucket, Plan, Prediction
from gradwire.core.processor_time import ProcessorNeed, waited_ns
from gradwire.core.profile import Profile, TensorProfile
from gradwire.core.provenance import Made, processor_name
from gradwire.core.schedules import (
    Backward,
    Delayed,
    LocalSteps,
    Nesterov,
    Pipelined,
    Schedule,
    as_schedule,
    required_fields,
    schedule_class,
    schedule_kinds,
)
from gradwire.core.schedules.delayed import FIRST_K
from gradwire.core.specs import (
    DGC,
    FP8,
    QSGD,
    BlockTopK,
    Cast,
    EFSignSGD,
    ElementRun,
    ElementWeights,
    ErrorFeedback,
    Identity,
    Int8,
    Natural,
    OneBit,
    PowerSGD,
    RandomK,
    SignSGD,
    Signum,
    Spec,
    TernGrad,
    Threshold,
    TopK,
    Truncate,
    TwoBit,
    as_spec,
    example_specs,
    innermost,
    installed_specs,
    register_spec,
    spec_from_dict,
    spec_from_text,
)
from gradwire.core.strict import Document, check_plain, convert, parse, read
from gradwire.core.sums import AT_ONCE, columns_of, goes_around, least_ring_bytes, merge_levels, peers_of, primes_of, rows_of
from gradwire.core.switches import SHARED_MEMORY, SWITCH_WORDS, check_switches, switch
from gradwire.core.tensors import Shaped, TensorInfo, fingerprint

__all__ = [
    "ALL_REDUCE", "AT_ONCE", "CODEC_TASKS", "COLLECTIVES", "DGC", "DTYPE_BYTES", "ENCODED_DTYPES", "FAR_US", "FIRST_K", "FP8",
    "LANES", "LIBRARY", "LINKS", "LINK_TASKS", "MOST_RANKS", "QSGD", "RAW", "RESIDUAL_DTYPES", "ROUTINES", "SHARED_MEMORY",
    "SIGN_UNIT", "SWITCH_WORDS", "Backward", "BlockTopK", "Bucket", "Cast", "Cluster", "CodecCosts", "Collective", "Costs",
    "Delayed", "Document", "EFSignSGD", "ElementRun", "ElementWeights", "ErrorFeedback", "Identity", "Int8", "Link",
    "LocalSteps", "Made", "MemoryRecord", "Natural", "Nesterov", "OneBit", "Pipelined", "Plan", "Points", "PowerSGD",
    "Prediction", "ProcessorNeed",
    "Profile", "RandomK", "Schedule", "Shaped", "SignSGD", "Signum", "Spec", "TensorInfo", "TensorProfile", "TernGrad",
    "Threshold", "TopK", "Truncate", "TwoBit", "as_schedule", "as_spec", "changed", "check_plain", "check_switches",
    "check_writable", "code_bytes", "coded_bytes", "codes_on_cpu", "collective", "collective_of", "columns_of", "convert",
    "entry_points", "error_words", "example_specs", "fingerprint", "flags", "freeze", "freeze_pairs", "gathers_of", "goes_around",
    "in_base_3", "index_bytes", "index_low_bits", "innermost", "installed_collectives", "installed_specs", "is_link_word",
    "kept_of", "lanes_of_pieces", "lanes_over", "launch_tasks", "least_ring_bytes", "make_folder", "merge_levels", "named",
    "native", "near", "number", "numbers", "only_version", "pairs_ranks", "parse", "peers_of", "primes_of", "printable",
    "processor_name", "qsgd_bytes", "read", "read_text", "register_spec", "required_fields", "rows_of", "schedule_class",
    "schedule_kinds", "schedules", "show", "spec_from_dict", "spec_from_text", "specs", "switch", "tasks_by_lane", "text",
    "uncompressed", "under", "unique", "waited_ns", "whole", "wholes", "word", "write_whole",
]  # fmt: skip
