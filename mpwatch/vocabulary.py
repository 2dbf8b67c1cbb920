"""Names that every part agrees on, how a scale reads, and the cleaning of a script's text.

Validated here without torch, so that the command line refuses a bad name before anything starts.
Nothing in this module reads a clock, a file or a socket.
"""

import math
import re
from typing import Final, Literal, get_args

State = Literal[
    "starting",
    "running",
    "paused",
    "finished",
    "stopped",
    "crashed",
    "oom",
    "preempted",
    "stalled",
    "killed",
    "lost",
    "never_trained",
]
STATES: Final[tuple[State, ...]] = get_args(State)
LIVE_STATES: Final[frozenset[str]] = frozenset({"starting", "running", "paused", "stalled"})

Phase = Literal[
    "data", "forward", "backward", "optimizer", "evaluation", "saving", "resuming", "other"
]
PHASES: Final[tuple[Phase, ...]] = get_args(Phase)

FaultName = Literal["overflow", "nan", "oom", "kill", "slow", "hub-kill", "hub-stop", "disk-full"]
FAULTS: Final[tuple[FaultName, ...]] = get_args(FaultName)
# Words that are part of the grammar but whose machinery belongs to later work: refused by name.
FAULTS_TO_COME: Final[frozenset[str]] = frozenset({"oom", "disk-full"})

PRECISIONS: Final[tuple[str, ...]] = ("O0", "O1", "O2", "O3")
SCALERS: Final[tuple[str, ...]] = (
    "torch",
    "apex",
    "deepspeed",
    "megatron",
    "fairseq",
    "doubling",
    "histogram",
)
# What a loss scaler does when it would pass its floor or ceiling, and what is done about gradients
# that are not finite where no scaler takes part.
AT_LIMIT: Final[tuple[str, ...]] = ("warn", "checkpoint", "stop")
ON_NONFINITE: Final[tuple[str, ...]] = ("warn", "skip", "stop", "rollback")
# Accepted words that need checkpoints, which belong to later work: refused by name.
ACTIONS_TO_COME: Final[frozenset[str]] = frozenset({"checkpoint", "rollback"})
HALF_DTYPES: Final[tuple[str, ...]] = ("fp16", "bf16")
INTERVAL_UNITS: Final[tuple[str, ...]] = ("windows", "micro_batches", "samples")
POLICIES: Final[tuple[str, ...]] = ("fixed", "goodput", "critical", "window")

# Default cadences, in steps of the leading optimizer.
GRAD_NORM_EVERY: Final = 50
MEMORY_EVERY: Final = 20
GRADIENTS_EVERY: Final = 200
ACTIVATIONS_EVERY: Final = 500
# How much is watched after each backward, to tell which micro-batch overflowed.
LOCATE_MODES: Final[tuple[str, ...]] = ("auto", "full", "off")

SCHEDULES: Final[tuple[str, ...]] = ("updates", "samples")
LR_RULES: Final[tuple[str, ...]] = ("none", "linear", "sqrt", "adascale", "auto")

# Every line that mpwatch writes to a script's stderr begins with this.
STDERR_PREFIX: Final = "mpwatch: "

_INTERVAL: Final = re.compile(r"([0-9]{1,10}) ?([a-z_]*)")
# Controls, and what is invisible or turns the order of what is shown.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufeff"
    r"\ufff9-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
_LINE_OR_TAB = re.compile(r"[\t\n\r\u2028\u2029]")
_ESCAPE_SEQUENCE = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])"
)


def parse_precision(text: str) -> tuple[str, str | None]:
    """The mode and, where given, the 16-bit format of a precision such as "O1" or "O1:fp16".

    Raises:
        ValueError: quoting the text and saying what is allowed.
    """
    mode, separator, dtype = text.partition(":")
    right = mode in PRECISIONS and (not separator or (dtype in HALF_DTYPES and mode != "O0"))
    if not right:
        raise ValueError(
            f"{clean_text(text, 40)!r} is no precision; allowed are O0, and O1, O2, O3 by"
            " themselves or with :fp16 or :bf16"
        )
    return mode, dtype or None


def parse_interval(text: str) -> tuple[int, str]:
    """Count and unit of a growth interval: "2000" (windows), "64000samples".

    Raises:
        ValueError: quoting the text and saying what is allowed.
    """
    found = _INTERVAL.fullmatch(text.replace("-", "_"))
    unit = (found[2] or "windows") if found else ""
    if found is None or unit not in INTERVAL_UNITS or not 1 <= int(found[1]) <= 10**9:
        raise ValueError(
            f"{clean_text(text, 40)!r} is no interval; allowed are 1 to 10^9 windows, or with a"
            " unit: 64000samples, 16384micro_batches"
        )
    return int(found[1]), unit


def scale_words(value: float) -> str:
    """A loss scale as a person reads it: 65536 and 0.5 in full, 2^40 where digits say nothing."""
    if not math.isfinite(value) or value == 0.0:
        return f"{value:g}"
    if value == int(value) and abs(value) < 1e7:
        return f"{value:.0f}"
    fraction, exponent = math.frexp(value)
    if fraction == 0.5 and not 2.0**-6 <= value < 1.0:
        return f"2^{exponent - 1}"
    return f"{value:g}" if 2.0**-6 <= abs(value) < 1.0 else f"{value:.4g}"


def clean_text(text: str, limit: int = 2000) -> str:
    """Return `text` fit for a terminal: one line, no escape sequence, no control character.

    Names, reasons and output of a script are untrusted: they can not draw or command.
    Ends of lines and tabs become spaces; what cannot be seen goes; what is longer than `limit`
    characters is cut.
    """
    text = _ESCAPE_SEQUENCE.sub("", text[: limit * 4])
    text = _LINE_OR_TAB.sub(" ", text)
    text = _UNSEEN.sub("", text)
    # Lone surrogates (bytes that were no UTF-8) cannot be encoded again.
    text = text.encode("utf-8", "replace").decode("utf-8")
    return text if len(text) <= limit else text[: limit - 3] + "..."


# Stable parts of the texts of out-of-memory errors; searched, not anchored: loader workers
# re-raise with their own traceback in front.
_OUT_OF_MEMORY_TEXTS: Final = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "Caught OutOfMemoryError",
)
_OUT_OF_MEMORY_TYPES: Final = frozenset({"OutOfMemoryError", "MemoryError", "_ArrayMemoryError"})


def is_out_of_memory(type_name: str, message: str) -> bool:
    """Whether an exception of this class name and text says that memory ran out."""
    return type_name in _OUT_OF_MEMORY_TYPES or any(t in message for t in _OUT_OF_MEMORY_TEXTS)
