"""From what a person asked for (options, `watch()`, commands) to the parts that do it.

Owns which parts there are and in which order; what each does is its own.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from mpwatch import commands
from mpwatch.vocabulary import (
    ACTIONS_TO_COME,
    ON_NONFINITE,
    parse_interval,
    parse_precision,
    scale_words,
)
from mpwatch_agent import hooks_edges
from mpwatch_agent.nonfinite import OnNonfinite
from mpwatch_agent.precision import Precision
from mpwatch_agent.replaced_scaler import ReplacedScaler, replaced_event
from mpwatch_agent.scaler_presets import PRESETS, Policy, policy_of

if TYPE_CHECKING:
    from mpwatch_agent.agent import Agent


def put_on(agent: "Agent", settings: Mapping[str, Any]) -> None:
    """Add the parts that `settings` ask for; none of them where nothing is asked.

    Raises:
        ValueError: a value that is not allowed.
    """
    boundary = agent.boundary
    boundary.carries_out(commands.SetScale, functools.partial(set_scale, agent))
    boundary.carries_out(commands.SetScalerPolicy, functools.partial(set_scaler_policy, agent))
    policy = policy_from(settings)
    text = settings.get("precision")
    mode, dtype = parse_precision(text) if text else ("O0", None)
    if mode != "O0":
        precision = Precision(agent, mode, dtype, policy)
        agent.steering.add(precision)
        entered = agent.guard("steering at autocast", precision.forwards.autocast_entered)
        agent.hook_as_well(torch.autocast, "__enter__", hooks_edges.autocast(agent, entered))
        agent.roots.found = agent.guard_steering("steering at a root", agent.steering.root_found)
        agent.roots.lost = agent.guard_steering("steering without roots", agent.steering.roots_lost)
    if policy is not None and _part(agent, ReplacedScaler) is None:
        replace_policy(agent, policy)
    action = settings.get("on_nonfinite")
    if action is not None:
        if action not in ON_NONFINITE:
            raise ValueError(f"on_nonfinite is {action!r}; allowed: {', '.join(ON_NONFINITE)}")
        if action in ACTIONS_TO_COME:
            raise ValueError(f"on_nonfinite {action} is not built into this version")
        agent.steering.add(OnNonfinite(agent, action))


def ask_again(agent: "Agent", wishes: Mapping[str, Any]) -> None:
    """Add what a call of `watch()` asks for; asking the same again changes nothing.

    Raises:
        ValueError: a value that is not allowed, or another one than before.
    """
    new = {key: value for key, value in wishes.items() if agent.wishes.get(key) != value}
    known = [key for key in new if agent.wishes.get(key) is not None]
    if known:
        raise ValueError(f"{known[0]} is {agent.wishes[known[0]]!r} in this loop already")
    if new:
        put_on(agent, {**new, "scaler": wishes.get("scaler")})
        agent.wishes.update(new)


def replace_policy(agent: "Agent", policy: Policy) -> ReplacedScaler:
    """From now on the script's own GradScalers follow `policy`."""
    part = ReplacedScaler(agent, policy)
    agent.steering.add(part)
    return part


def policy_from(settings: Mapping[str, Any]) -> Policy | None:
    """The loss scaler that `settings` ask for, None where they name none.

    Raises:
        ValueError: a value that is not allowed.
    """
    name = settings.get("scaler")
    if isinstance(name, Policy):
        return name
    if name is None:
        return None
    interval = settings.get("growth_interval")
    count, unit = parse_interval(str(interval)) if interval is not None else (None, None)
    return policy_of(
        name,
        init_scale=settings.get("init_scale"),
        growth_factor=settings.get("growth_factor"),
        backoff_factor=settings.get("backoff_factor"),
        growth_interval=count,
        interval_unit=unit,
        hysteresis=settings.get("hysteresis"),
        consecutive=settings.get("consecutive_hysteresis"),
        floor=settings.get("scale_floor"),
        ceiling=settings.get("scale_ceiling"),
        at_floor=settings.get("at_floor"),
        at_ceiling=settings.get("at_ceiling"),
    )


# --- commands -----------------------------------------------------------------------------------


def set_scale(agent: "Agent", command: commands.SetScale) -> str:
    """Set the loss scale, whoever scales; returns what the person should know.

    Raises:
        ValueError: there is nothing to set, or the value is none.
    """
    flight = _flight(agent)
    if flight is not None:
        flight.scaler.adopt(command.scale, hold=True)
        return f"scale {scale_words(flight.scaler.scale)}"
    part = _part(agent, ReplacedScaler)
    if part is not None and part.set_scale(command.scale):
        return f"scale {scale_words(command.scale)}"
    scaler = _own_scaler(agent)
    scaler._scale.fill_(command.scale)
    scaler._growth_tracker.fill_(0)
    return f"scale {scale_words(command.scale)}, by the script's own {type(scaler).__name__}"


def set_scaler_policy(agent: "Agent", command: commands.SetScalerPolicy) -> str:
    """Have the loss scale follow other rules from now on.

    Raises:
        ValueError: there is nothing that could follow them, or a knob is out of range.
    """
    policy = policy_from(commands.arguments_of(command) | {"scaler": command.policy})
    assert policy is not None
    flight = _flight(agent)
    if flight is not None:
        before = flight.scaler.policy.name
        flight.scaler.follow_policy(policy)
        agent.reports.tell(replaced_event(flight.scaler, before, agent.loop.steps))
        return f"{policy.name} from scale {scale_words(flight.scaler.scale)} on"
    part = _part(agent, ReplacedScaler)
    if part is not None and part.follow(policy):
        return f"{policy.name} from the present scale on"
    scaler = _own_scaler(agent)
    replace_policy(agent, policy).scale_begins(scaler)
    return f"{policy.name} instead of the script's {type(scaler).__name__}'s own rules"


def _flight(agent: "Agent") -> Any:
    precision = _part(agent, Precision)
    return precision.flight if precision is not None and precision.state != "off" else None


def _part(agent: "Agent", kind: type[Any]) -> Any:
    return next((part for part in agent.steering.parts if isinstance(part, kind)), None)


def _own_scaler(agent: "Agent") -> Any:
    scaler = agent.loop.scaler
    if scaler is None or not scaler._enabled or scaler._scale is None:
        raise ValueError(
            "there is no loss scaler in this loop: neither a GradScaler of the script's nor"
            f" --precision with fp16 (scalers: {', '.join(PRESETS)})"
        )
    return scaler
