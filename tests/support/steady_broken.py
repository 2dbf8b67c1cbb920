"""A loop in which one thing after the other that noted moments call raises, while steps are noted.

Argument: `fails` (what is raised is ours) or `interrupts` (it is the script's, which catches it and
goes on). Prints what `steady_loop` prints; the last line is [names that raised, weights].
"""

import json
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mpwatch_agent import (
    agent,
    boundary,
    memory,
    micro_flags,
    observing,
    phases,
    reports,
    sampling,
    steady,
    steady_notes,
    steady_terms,
    window_watch,
    witness,
)
from mpwatch_agent.device import Reader

KIND = sys.argv[1]
WINDOW = 2
# Each is called by a noted moment, or on the way in or out.
CALLED: list[tuple[Any, str]] = [
    (Reader, "read"),
    (steady, "MicroBatch"),
    (steady, "StepDraft"),
    (steady, "learning_rates"),
    (steady.Steady, "_scale_is"),
    (steady_terms, "steps_alike"),
    (steady_notes.Notes, "_begin"),
    (steady_notes.Notes, "_back_off"),
    (steady_notes.Notes, "_add"),
    (steady_notes.Notes, "_look_over"),
    (witness.Witness, "forward_begins"),
    (micro_flags.MicroFlags, "backward_ended"),
    (micro_flags.MicroFlags, "window_over"),
    (micro_flags.MicroFlags, "window_is_watched"),
    (window_watch.WindowWatch, "clip_begins"),
    (boundary.Boundary, "is_asked"),
    (phases.PhaseClock, "follow"),
    (phases.PhaseClock, "take"),
    (observing.Observing, "step_noted"),
    (memory.MemoryEdges, "edge"),
    (sampling.Sampling, "step_over"),
    (reports.Reports, "keep"),
    (reports.Reports, "flush"),
]
STEPS_EACH = 9
watching = agent.installed()
raised: list[str] = []
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=KIND == "fails")
loader = DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=4)
applied = 0
optimizer.register_step_post_hook(lambda *_: count())


def count() -> None:
    global applied
    applied += 1


def breaks(owner: Any, name: str) -> None:
    """From now on `owner.name` raises where a noted moment calls it, once."""
    original, label = getattr(owner, name), f"{owner.__name__}.{name}"

    def fails(*args: Any, **kwargs: Any) -> Any:
        caller = sys._getframe(1).f_code.co_filename
        if "steady" in caller and "steady_broken" not in caller and label not in raised:
            raised.append(label)
            raise OSError("on purpose") if KIND == "fails" else KeyboardInterrupt
        return original(*args, **kwargs)

    setattr(owner, name, fails)


def leave(step: int) -> None:
    """What is noted is worked through now and then, as for anything unusual."""
    if step % STEPS_EACH == STEPS_EACH - 1:
        with torch.device("cpu"):
            # A mode that would see readings of ours.
            pass


def update(facts: dict[str, Any]) -> None:
    batches = iter(loader)
    for _ in range(WINDOW):
        (batch,) = next(batches)
        loss = model(batch).pow(2).mean()
        scaler.scale(loss).backward()
        facts["losses"].append(loss.item())
        facts["samples"] += len(batch)
    scaler.unscale_(optimizer)
    facts["norm"] = nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
    scaler.step(optimizer)
    facts["applied"] = True
    scaler.update()
    optimizer.zero_grad()


def again() -> None:
    """Steps may be noted again, at once."""
    if watching is not None:
        watching.steady._broken = False
        watching.steady._wait = watching.steady._last_wait = 0
        watching.steady._due_at = watching.steady._look_at = 0.0


step = 0
while step < STEPS_EACH * (len(CALLED) + 2):
    facts: dict[str, Any] = {"losses": [], "samples": 0, "norm": None, "applied": False}
    facts["lr"], facts["before"], facts["after"] = 0.01, None, None
    place = step // STEPS_EACH - 1
    if step % STEPS_EACH == 0:
        again()
    if step % STEPS_EACH == 4 and watching is not None and 0 <= place < len(CALLED):
        watching.steady._due_at = watching.steady._look_at = 0.0
        breaks(*CALLED[place])
    before = applied
    try:
        update(facts)
        leave(step)
    except KeyboardInterrupt:
        model.train()
        optimizer.zero_grad()
        if applied == before:
            continue
    step += 1
    facts["applied"] = applied > before
    print(json.dumps(facts), flush=True)
print(json.dumps([raised, [p.tolist() for p in model.parameters()]]))
