"""The options of `mpwatch plan`, and what they describe: model, device, limits, module to track.

Reads files and asks NVML; everything unusable raises UsageError with the cause.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from msgspec import structs

from mpwatch.cli.plan_tracking import Target
from mpwatch.errors import UsageError
from mpwatch.planner.cards import Card, cpu_of, find_card, unnamed_card
from mpwatch.planner.hf_config import from_hf_config
from mpwatch.planner.model import LARGEST_DIMENSION, Model, PlainModel, transformer
from mpwatch.planner.numerics import EXACT, FAMILIES
from mpwatch.planner.plans import Budget, Limits
from mpwatch.planner.units import parse_count, parse_interval

SHAPE_OPTIONS = {
    "layers": "layers",
    "hidden": "width",
    "heads": "attention heads",
    "seq": "tokens per sample",
    "vocab": "words",
}
LONGEST_TIMEOUT_S = 86_400
PRESETS = ("simple-tree", "param-fraction")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpwatch plan`."""
    _add_device(parser.add_argument_group("device"))
    _add_model(parser.add_argument_group("model"))
    _add_limits(parser.add_argument_group("limits"))
    _add_output(parser.add_argument_group("output"))


def _add_device(group: Any) -> None:
    group.add_argument("--card", help="a card (T4, 3090, H100, ...) or its memory: 24GB, 16GiB")
    group.add_argument(
        "--free",
        nargs="?",
        const=0,
        type=int,
        metavar="GPU",
        help="ask the driver what GPU (default 0) has free now, other processes counted",
    )
    group.add_argument(
        "--cpu",
        action="store_true",
        help="training runs on torch's CPU kernels in that much memory, not on CUDA",
    )
    group.add_argument("--devices", type=int, default=1, help="data-parallel devices (default 1)")


def _add_model(group: Any) -> None:
    group.add_argument("--params", help="trained parameters, such as 1.3B")
    for name, what in SHAPE_OPTIONS.items():
        group.add_argument(f"--{name}", type=int, metavar="N", help=f"transformer shape: {what}")
    group.add_argument("--dropout", action="store_true", help="the transformer's layers drop out")
    group.add_argument("--hf-config", metavar="FILE", help="a Hugging Face config.json")
    group.add_argument("--model", metavar="FILE.py:FACTORY", help="a module, tracked exactly")
    group.add_argument(
        "--input-shape",
        action="append",
        metavar="SHAPE",
        help="shape of one input without the batch: 128 or 3,224,224; repeat for more inputs",
    )
    group.add_argument("--input-dtype", action="append", metavar="DTYPE", help="default float32")
    group.add_argument(
        "--loss",
        default="mean",
        metavar="LOSS",
        help="mean (default: a scalar output or .loss as it is, else the mean of the output),"
        " cross_entropy, or file.py:function(output, *inputs)",
    )
    group.add_argument(
        "--track-timeout", type=float, default=120.0, metavar="S", help="default 120 seconds"
    )


def _add_limits(group: Any) -> None:
    group.add_argument("--batch", type=int, help="samples per optimizer step on all devices, B")
    group.add_argument("--max-accumulation", type=int, default=128, metavar="N")
    group.add_argument("--min-batch", type=int, default=1, metavar="B")
    group.add_argument("--min-micro-batch", type=int, default=1, metavar="b")
    group.add_argument("--precision", default="", help="allowed precisions, such as O1:fp16,O2")
    group.add_argument("--optimizer", default="adamw", help="adamw, sgd, sgd-momentum, ...")
    group.add_argument("--lora-rank", type=int, default=8, metavar="R")
    group.add_argument(
        "--family",
        choices=("exact", "all"),
        default="all",
        help="exact: nothing that changes the learning problem",
    )
    group.add_argument("--noise-scale", metavar="PHI", help="gradient noise scale: 465, 300..600")


def _add_output(group: Any) -> None:
    group.add_argument("--json", action="store_true", help="print the documented JSON object")
    group.add_argument("--rows", type=int, default=16, help="rows of the table (default 16)")
    group.add_argument("--plot", action="store_true", help="draw memory against time as text")
    group.add_argument("--space", action="store_true", help="precision x N x sharding at a glance")
    group.add_argument("--picture", metavar="FILE", help="the plot (or space) as .png or .svg")
    group.add_argument("--preset", choices=PRESETS, help="a published rule of thumb, to compare")
    group.add_argument("--emit", metavar="FILE", help="write the recommendation as TOML")
    group.add_argument(
        "--verify",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="run a few steps of SCRIPT [ARGS] under the agent and set predicted against measured;"
        " the last option, all that follows belongs to the script",
    )
    group.add_argument("--verify-steps", type=int, default=5, metavar="N")


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file. Raises UsageError."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is no JSON object")
    return value


def described(arguments: argparse.Namespace) -> bool:
    """Whether a config, a shape or a size describes the model, with or without a module."""
    shape = any(getattr(arguments, name) is not None for name in SHAPE_OPTIONS)
    return bool(arguments.hf_config or arguments.params or shape)


def read_model(arguments: argparse.Namespace) -> Model:
    """The model that config, shape or size describe. Raises UsageError."""
    if arguments.hf_config:
        shape = from_hf_config(read_json(arguments.hf_config), arguments.seq)
        return structs.replace(shape, dropout=arguments.dropout)
    parameters = parse_count(arguments.params, "--params") if arguments.params else None
    given = [name for name in SHAPE_OPTIONS if getattr(arguments, name) is not None]
    if not given and parameters is not None:
        return PlainModel(parameters=parameters)
    missing = [f"--{name}" for name in SHAPE_OPTIONS if name not in given]
    if missing:
        raise UsageError(
            f"the model is not described: missing {', '.join(missing)};"
            " or give --params alone, --hf-config or --model"
        )
    return transformer(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        sequence=arguments.seq,
        vocabulary=arguments.vocab,
        parameters=parameters,
        dropout=arguments.dropout,
    )


def read_limits(arguments: argparse.Namespace) -> Limits:
    """The constraints. Raises UsageError."""
    if arguments.batch is None:
        raise UsageError("no batch: give --batch, the samples per optimizer step on all devices")
    noise = arguments.noise_scale
    return Limits(
        batch=arguments.batch,
        devices=arguments.devices,
        max_accumulation=arguments.max_accumulation,
        min_batch=arguments.min_batch,
        min_micro_batch=arguments.min_micro_batch,
        families=(EXACT,) if arguments.family == "exact" else FAMILIES,
        precisions=tuple(filter(None, arguments.precision.split(","))),
        optimizer=arguments.optimizer,
        lora_rank=arguments.lora_rank,
        cuda=not arguments.cpu,
        noise_scale=parse_interval(noise, "--noise-scale") if noise else None,
    )


def read_device(arguments: argparse.Namespace) -> tuple[Card, Budget]:
    """The card and what of it may be used. Raises UsageError."""
    if arguments.free is not None:
        return _free_device(arguments.free, arguments.card)
    if not arguments.card:
        raise UsageError("no device: give --card NAME, --card SIZE, or --free")
    card = find_card(arguments.card)
    if arguments.cpu:
        return cpu_of(card), Budget(memory_bytes=card.memory_bytes, context_bytes=0)
    return card, Budget(memory_bytes=card.memory_bytes)


def _free_device(index: int, named: str | None) -> tuple[Card, Budget]:
    """What the driver says is free on a GPU now; not verified on a GPU by this project's tests."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        name = str(pynvml.nvmlDeviceGetName(handle))
        free = int(pynvml.nvmlDeviceGetMemoryInfo(handle).free)
    except pynvml.NVMLError as error:
        raise UsageError(f"--free: no answer from NVML ({error}): give --card instead") from error
    if named is not None:
        return find_card(named), Budget(memory_bytes=free)
    short = name.removeprefix("NVIDIA ").removeprefix("Tesla ").removeprefix("GeForce ")
    try:
        card = find_card(short.removeprefix("RTX ").replace(" ", ""))
    except UsageError:
        card = unnamed_card(name, free)
    return card, Budget(memory_bytes=free)


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.replace("x", ",").split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise UsageError(f"--input-shape {text!r} is not understood: write 128 or 3,224,224")
    sizes = tuple(int(part[:20]) for part in parts)
    if not all(1 <= size <= LARGEST_DIMENSION for size in sizes):
        raise UsageError(f"--input-shape {text!r} is out of range: 1 to {LARGEST_DIMENSION:.0e}")
    return sizes


def read_target(arguments: argparse.Namespace) -> Target:
    """The module to track. Raises UsageError."""
    if not arguments.input_shape:
        raise UsageError("--model needs --input-shape: one sample's shape, such as 128")
    shapes = tuple(map(_shape, arguments.input_shape))
    dtypes = tuple(arguments.input_dtype or ("float32",))
    if len(dtypes) == 1:
        dtypes *= len(shapes)
    if len(dtypes) != len(shapes):
        raise UsageError(f"{len(shapes)} --input-shape but {len(dtypes)} --input-dtype")
    if not 0 < arguments.track_timeout <= LONGEST_TIMEOUT_S:
        raise UsageError(
            f"--track-timeout {arguments.track_timeout:g} is out of range: up to"
            f" {LONGEST_TIMEOUT_S} seconds"
        )
    return Target(
        model=arguments.model,
        input_shapes=shapes,
        input_dtypes=dtypes,
        loss=arguments.loss,
        timeout_s=arguments.track_timeout,
        cpu=arguments.cpu,
    )
