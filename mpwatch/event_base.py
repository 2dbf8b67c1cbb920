"""The base of all events, and how its kind is spelt on the wire."""

import re

import msgspec


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Event(
    msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=_snake, omit_defaults=True
):
    """Base of all events; `kind` on the wire is the class name in snake_case."""
