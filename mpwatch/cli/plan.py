"""Say which configuration fits a card, how fast it is and what it gives up.

The verb only reads arguments and files, starts the tracking child and prints; what is said comes
from `mpwatch.planner`. Exit code 0: something fits, 1: nothing fits, 2: the question is unusable.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from mpwatch.cli.plan_table import print_survey
from mpwatch.errors import EXIT_OK, EXIT_REFUSED, UsageError
from mpwatch.planner.cards import Card, find_card
from mpwatch.planner.model import Model, PlainModel, from_hf_config, transformer
from mpwatch.planner.numerics import EXACT, FAMILIES
from mpwatch.planner.plans import Budget, Limits
from mpwatch.planner.survey import Survey, survey
from mpwatch.planner.units import parse_count, parse_interval

SHAPE_OPTIONS = ("layers", "hidden", "heads", "seq", "vocab")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `mpwatch plan`."""
    device = parser.add_argument_group("device")
    device.add_argument(
        "--card", help="a card's name (T4, 3090, H100, ...) or its memory: 24GB, 16GiB"
    )
    device.add_argument("--devices", type=int, default=1, help="data-parallel devices (default 1)")
    model = parser.add_argument_group("model")
    model.add_argument("--params", help="trained parameters, such as 1.3B")
    for name, what in zip(
        SHAPE_OPTIONS,
        ("layers", "width", "attention heads", "tokens per sample", "words"),
        strict=True,
    ):
        model.add_argument(f"--{name}", type=int, help=f"transformer shape: {what}")
    model.add_argument("--hf-config", metavar="FILE", help="a Hugging Face config.json")
    model.add_argument("--dropout", action="store_true", help="the layers use dropout")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--batch", type=int, required=True, help="samples per optimizer step, B")
    limits.add_argument("--max-accumulation", type=int, default=128, metavar="N")
    limits.add_argument("--min-batch", type=int, default=1, metavar="B")
    limits.add_argument("--min-micro-batch", type=int, default=1, metavar="b")
    limits.add_argument("--precision", default="", help="allowed precisions, such as O1:fp16,O2")
    limits.add_argument("--optimizer", default="adamw", help="adamw, sgd, sgd-momentum, ...")
    limits.add_argument("--lora-rank", type=int, default=8, metavar="R")
    limits.add_argument("--family", choices=("exact", "all"), default="all")
    limits.add_argument(
        "--noise-scale", metavar="PHI", help="gradient noise scale: 465 or 300..600"
    )
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print the documented JSON object")
    output.add_argument("--rows", type=int, default=16, help="rows of the table (default 16)")


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file. Raises UsageError with the cause."""
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise UsageError(f"{path} is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is no JSON object")
    return value


def read_model(arguments: argparse.Namespace) -> Model:
    """The model that the options describe. Raises UsageError."""
    if arguments.hf_config:
        return from_hf_config(read_json(arguments.hf_config), arguments.seq)
    parameters = parse_count(arguments.params, "--params") if arguments.params else None
    given = [name for name in SHAPE_OPTIONS if getattr(arguments, name) is not None]
    if not given and parameters is not None:
        return PlainModel(parameters=parameters)
    missing = [f"--{name}" for name in SHAPE_OPTIONS if name not in given]
    if missing:
        raise UsageError(
            f"the model is not described: give {', '.join(missing)}, or --params alone"
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
        noise_scale=parse_interval(noise, "--noise-scale") if noise else None,
    )


def read_device(arguments: argparse.Namespace) -> tuple[Card, Budget]:
    """The card and what of it may be used. Raises UsageError."""
    if not arguments.card:
        raise UsageError("no device: give --card NAME or --card SIZE")
    card = find_card(arguments.card)
    return card, Budget(memory_bytes=card.memory_bytes)


def run(arguments: argparse.Namespace) -> int:
    """Answer the question. Returns 0 when something fits, 1 when nothing does."""
    card, budget = read_device(arguments)
    answer: Survey = survey(read_model(arguments), card, budget, read_limits(arguments))
    print_survey(answer, budget, arguments.rows)
    return EXIT_OK if answer.recommended is not None else EXIT_REFUSED
