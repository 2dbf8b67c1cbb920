"""The tracking child: one JSON request on stdin, one JSON line on stdout for each answer.

Started by the planner as `python -P -m mpwatch_agent.track_child` with a timeout, because a user's
factory may raise, hang, print, or allocate without end: memory is limited here, prints go to
stderr, and every answer is flushed so that a kill loses only what was not finished.
"""

import contextlib
import gc
import os
import resource
import sys
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec
import torch
from msgspec import Struct
from torch.utils.flop_counter import FlopCounterMode

from mpwatch_agent.track_phases import Tracked, track
from mpwatch_agent.track_step import Step
from mpwatch_agent.track_subject import (
    Configuration,
    SharedFakeMode,
    Subject,
    find_dtype,
    find_loss,
    load_function,
)

DATA_DEPENDENT = (
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "GuardOnDataDependentSymNode",
)
ONE_SAMPLE = "Expected more than 1 value per channel when training"
"""batch norm over a single sample"""


class Request(Struct, kw_only=True):
    """What to track."""

    model: str
    """file.py:factory"""
    input_shapes: list[tuple[int, ...]]
    input_dtypes: list[str]
    loss: str
    configurations: list[Configuration]
    cpu: bool = False
    """count what CPU kernels take below the dispatcher"""
    limit_bytes: int
    """most data memory this process may take"""


class Answer(Struct, frozen=True, kw_only=True, tag_field="kind", tag="tracked"):
    """A configuration was tracked."""

    tracked: Tracked
    real: bool
    """on real tensors, since the module reads values of tensors"""


class Failure(Struct, frozen=True, kw_only=True, tag_field="kind", tag="failed"):
    """A configuration, or with None everything, could not be tracked."""

    configuration: Configuration | None
    cause: str


class Work(Struct, frozen=True, kw_only=True, tag_field="kind", tag="work"):
    """FLOPs of forward and backward for one sample; None is unknown."""

    flops_per_sample: float | None


def cause_of(error: BaseException, model: str) -> str:
    """One line: class, first line of the text, and the last place in the model's own folder."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    home = Path(model.rpartition(":")[0]).resolve().parent
    places = [
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")  # frozen modules, built code
        and home in Path(frame.filename).resolve().parents
        and Path(__file__).parent not in Path(frame.filename).resolve().parents
        and "site-packages" not in frame.filename
    ]
    where = f" ({places[-1]})" if places else ""
    name = type(error).__name__
    if ONE_SAMPLE in text:
        text += "; give --min-micro-batch 2"
    if name in DATA_DEPENDENT:
        return f"the module's work depends on values of tensors{where}: {name} {text}"[:400]
    return f"{name}: {text}{where}"[:400]


def _is_data_dependent(error: BaseException) -> bool:
    return type(error).__name__ in DATA_DEPENDENT


def _limit_memory(nbytes: int) -> None:
    """No allocation beyond this, whoever makes it; unsupported platforms go without."""
    with contextlib.suppress(ValueError, OSError):
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, hard))


def _flops(subject: Subject, micro_batch: int) -> float | None:
    """Counted on fake tensors; None where an operator has no count or the module refuses."""
    counter = FlopCounterMode(display=False)
    with SharedFakeMode():
        step = Step(subject, Configuration(micro_batch=micro_batch))
        with counter:
            step.window(lambda _: None)
    return counter.get_total_flops() / micro_batch or None


class Child:
    """Answers one request."""

    def __init__(self, request: Request, out: BinaryIO) -> None:
        self.request, self.out = request, out
        self.real = False

    def say(self, message: Answer | Failure | Work) -> None:
        """One flushed line."""
        self.out.write(msgspec.json.encode(message) + b"\n")
        self.out.flush()

    def subject(self) -> Subject:
        """The user's side. Raises whatever the user's file raises."""
        request = self.request
        return Subject(
            factory=load_function(request.model),
            input_shapes=tuple(request.input_shapes),
            input_dtypes=tuple(find_dtype(name) for name in request.input_dtypes),
            loss=find_loss(request.loss),
        )

    def run(self) -> None:
        """Every configuration in the order asked for; after the first failure that is not its
        own (checkpointing without blocks is), nothing more."""
        try:
            subject = self.subject()
        except BaseException as error:
            self.say(Failure(configuration=None, cause=cause_of(error, self.request.model)))
            return
        for index, configuration in enumerate(self.request.configurations):
            try:
                self.say(self._tracked(subject, configuration))
            except (Exception, SystemExit) as error:
                own = index > 0 or configuration.checkpointing != "none"
                failed = configuration if own else None
                self.say(Failure(configuration=failed, cause=cause_of(error, self.request.model)))
                if failed is None:
                    return
            if index == 0 and not self.real:
                self._say_work(subject, configuration.micro_batch)

    def _say_work(self, subject: Subject, micro_batch: int) -> None:
        try:
            flops = _flops(subject, micro_batch)
        except Exception:
            flops = None
        self.say(Work(flops_per_sample=flops))

    def _tracked(self, subject: Subject, configuration: Configuration) -> Answer:
        """On fake tensors, or for good on real ones once values turn out to matter."""
        if not self.real:
            try:
                return Answer(
                    tracked=track(subject, configuration, cpu=self.request.cpu), real=False
                )
            except Exception as error:
                if not _is_data_dependent(error):
                    raise
                cause = cause_of(error, self.request.model)
                print(f"mpwatch: {cause}; trying real tensors", file=sys.stderr)
        found = track(subject, configuration, fake=False, cpu=self.request.cpu)
        answer = Answer(tracked=found, real=True)
        self.real = True
        return answer


def prepare_process() -> None:
    """One thread, and a collector that seldom walks the old generation, which took a third of the
    time. Young garbage is collected as in any script: checkpointing leaves tensors in cycles."""
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(700, 10, 1000)


def main() -> None:
    """Keep stdout for answers; what the user's code prints goes to stderr."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    request = msgspec.json.decode(sys.stdin.buffer.read(), type=Request)
    prepare_process()
    _limit_memory(request.limit_bytes)
    Child(request, out).run()


if __name__ == "__main__":
    main()
