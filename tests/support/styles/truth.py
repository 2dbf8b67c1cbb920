"""What a style script counts by hand about its own loop, printed and written as it goes.

The scripts call it beside their own lines; it hooks nothing, imports neither torch nor mpwatch and
changes no tensor. At the end it prints a hash of the weights and, where STYLE_TRUTH names a file,
writes the counts there as JSON: the expectation that a watched run is held against.
"""

import hashlib
import json
import os


class Truth:
    """Hand-kept books over micro-batches, windows and steps.

    Optimizers are numbered in the order of their first step. Steps that follow each other without
    a micro-batch in between end one and the same window.
    """

    def __init__(self):
        self.steps = {}  # optimizer -> [(applied, losses of the window), ...]
        self.window = []
        self.stepped = False
        self.discarded = []

    def micro_batch(self, *losses, seen=True):
        """One forward is done and these losses go to backward now; together they are its loss."""
        if self.stepped:
            self.window, self.stepped = [], False
        values = [loss.item() for loss in losses]
        for value in values:
            print("loss", value.hex())
        self.window.append(sum(values) if seen else None)

    def step(self, applied=True, optimizer=0):
        """The window ended at `optimizer.step`, whose update was applied or skipped."""
        self.steps.setdefault(optimizer, []).append((bool(applied), list(self.window)))
        self.stepped = True

    def discard(self):
        """The script threw its window away: gradients cleared, no step."""
        self.discarded.append(len(self.window))
        self.window = []

    def finish(self, tensors=()):
        """Print the hash of the final weights and write the books."""
        digest = hashlib.sha256()
        for tensor in tensors:
            digest.update(tensor.detach().contiguous().numpy().tobytes())
        print("WEIGHTS", digest.hexdigest(), flush=True)
        if path := os.environ.get("STYLE_TRUTH"):
            left_over = 0 if self.stepped else len(self.window)
            books = {index: _summary(steps) for index, steps in self.steps.items()}
            first = books.get(0, _summary([]))
            extra = {"discarded": len(self.discarded), "left_over": left_over, "optimizers": books}
            with open(path, "w") as file:
                json.dump(first | extra, file)


def copy_of(parameters):
    """The parameters' values now, for `changed`."""
    return [parameter.detach().clone() for parameter in parameters]


def changed(parameters, before):
    """Whether an update was applied, told by nothing but the parameters themselves."""
    return any((now != old).any().item() for now, old in zip(parameters, before, strict=True))


def _summary(steps):
    applied = sum(was_applied for was_applied, _ in steps)
    return {
        "steps": len(steps),
        "applied": applied,
        "skipped": len(steps) - applied,
        "outcomes": [was_applied for was_applied, _ in steps],
        "micro_batches": [len(losses) for _, losses in steps],
        "losses": [losses for _, losses in steps],
    }
