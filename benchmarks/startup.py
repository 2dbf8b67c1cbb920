"""Start-up: launch over plain `python`, and the CPU that short verbs take, against the budgets.

    python benchmarks/startup.py [--rounds 15]

Interleaved, in fresh processes, against the same environment; prints minimum and median. The
minimum is compared with the budget: on a shared machine the rest is other people's work.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAUNCH_BUDGET_S = 0.35
CPU_BUDGET_S = 0.10
MPWATCH = [sys.executable, "-m", "mpwatch"]
# CLOCK_MONOTONIC is the same for every process of the machine.
FIRST_LINE = "import time; print(time.monotonic())"
LOOP = """
import threading, torch
torch.set_num_threads(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while True:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    threading.Event().wait(0.1)
"""


def environment() -> dict[str, str]:
    """This one, and the checkout on the path where mpwatch is not installed."""
    parts = [str(ROOT / part) for part in (".", "agent", "tui")]
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*parts, *([before] if before else [])])}


def launch(command: list[str], directory: str) -> tuple[float, float]:
    """Seconds to the script's first line, and to the command's end."""
    begin = time.monotonic()
    done = subprocess.run(
        command, cwd=directory, env=environment(), stdout=subprocess.PIPE, check=True
    )
    return float(done.stdout) - begin, time.monotonic() - begin


def cpu(command: list[str], directory: str) -> float:
    """User and system seconds of one process and what it waited for."""
    process = subprocess.Popen(
        command,
        cwd=directory,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    return usage.ru_utime + usage.ru_stime


def line(what: str, samples: list[float], budget: float | None = None) -> bool:
    """Print one result; whether it keeps its budget."""
    least, median = min(samples), statistics.median(samples)
    kept = budget is None or least <= budget
    verdict = "" if budget is None else f"  budget {budget:.2f}  {'ok' if kept else 'OVER'}"
    print(f"{what:<34} min {least:6.3f} s  median {median:6.3f} s{verdict}")
    return kept


def measure_launch(rounds: int, directory: str) -> bool:
    """Plain and watched in turn."""
    script = str(Path(directory) / "first_line.py")
    Path(script).write_text(FIRST_LINE)
    plain, watched, extra_end = [], [], []
    for _ in range(rounds):
        first, whole = launch([sys.executable, script], directory)
        plain.append(first)
        watched_first, watched_whole = launch([*MPWATCH, "run", "--headless", script], directory)
        watched.append(watched_first)
        extra_end.append((watched_whole - watched_first) - (whole - first))
    line("python, first line", plain)
    line("mpwatch run, first line", watched)
    over = [w - p for w, p in zip(watched, plain, strict=True)]
    kept = line("launch over python", over, LAUNCH_BUDGET_S)
    line("end over python (hub just started)", extra_end)
    return kept


def measure_verbs(rounds: int, directory: str) -> bool:
    """CPU of short verbs beside a live job; `ctl` gets a real outcome."""
    loop = Path(directory) / "loop.py"
    loop.write_text(LOOP)
    job = subprocess.Popen(
        [*MPWATCH, "run", "--headless", "--name", "job", str(loop)],
        cwd=directory,
        env=environment(),
        stdin=subprocess.DEVNULL,
    )
    try:
        wait_for_steps(directory)
        verbs: dict[str, Callable[[], float]] = {
            "python -c pass": lambda: cpu([sys.executable, "-c", "pass"], directory),
            "--help": lambda: cpu([*MPWATCH, "--help"], directory),
            "ls": lambda: cpu([*MPWATCH, "ls"], directory),
            "ctl": lambda: cpu([*MPWATCH, "ctl", "job", "set_sampling", "10"], directory),
            "show": lambda: cpu([*MPWATCH, "show", "job"], directory),
        }
        samples: dict[str, list[float]] = {name: [] for name in verbs}
        for _ in range(rounds):
            for name, run in verbs.items():
                samples[name].append(run())
    finally:
        job.terminate()
        job.wait(30)
    budgets = dict.fromkeys(("--help", "ls", "ctl"), CPU_BUDGET_S)
    kept = [line(f"CPU of {name}", took, budgets.get(name)) for name, took in samples.items()]
    return all(kept)


def wait_for_steps(directory: str) -> None:
    """Until the job has trained a little."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        listed = subprocess.run(
            [*MPWATCH, "ls", "--json"], cwd=directory, env=environment(), stdout=subprocess.PIPE
        )
        entries = [e for e in json.loads(listed.stdout or b"[]") if e["name"] == "job"]
        if entries and (entries[0]["steps"] or 0) > 2:
            return
    raise SystemExit("the job did not train within 60 s")


def main() -> int:
    """Measure and print; 1 where a budget is broken."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {rounds} rounds")
    with tempfile.TemporaryDirectory() as directory:
        kept = [measure_launch(rounds, directory), measure_verbs(rounds, directory)]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
