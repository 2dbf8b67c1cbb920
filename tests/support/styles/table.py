"""Every style of training loop that mpwatch must see right and leave alone, one row each.

A row names the command after `python` (run in this folder), how it ends, and, where the
definition of a micro-batch or a window makes the expected count subtle, why it is what it is.
Used by tests/integration/test_styles.py; the scripts themselves know nothing of it.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Style:
    """One script, its arguments, and what to expect of it beside its own hand-kept books."""

    name: str
    command: tuple[str, ...]
    exit_code: int = 0
    state: str = "finished"  # as `show` names it
    skips: bool = False  # some updates overflow: the books must say so
    compiled: bool = False
    unseen: bool = False  # micro-batches without a backward: counts and losses can not be known
    through_modules: bool = False  # its traceback passes through the hooks of nn.Module
    own_interpreter: bool = False  # must not be forked off a process with torch in it
    known: str = ""  # why watching is not yet without a trace here: that test is expected to fail
    notes: str = ""


def _style(command: str, name: str = "", **columns: object) -> Style:
    words = tuple(command.split())
    return Style(
        name=name or "_".join(words).replace(".py", ""),
        command=words,
        **columns,  # type: ignore[arg-type]
    )


STYLES: tuple[Style, ...] = (
    _style("late_import.py", own_interpreter=True),
    _style("main_function.py --lr 0.02", "main_function"),
    _style("-m toy.train 4", "package", own_interpreter=True),
    _style("own_scaler.py enabled 1", skips=True),
    _style("own_scaler.py enabled 2", skips=True),
    _style("own_scaler.py disabled 1 2", notes="two loops, one after the other"),
    _style("own_scaler.py cuda 1 2", notes="the scaler disables itself without CUDA and warns"),
    _style("accumulate.py", notes="windows of 4, 4 and 2: a partial window is a step like others"),
    _style("left_over.py", notes="the last two micro-batches belong to no step"),
    _style("foreach_adamw.py"),
    _style("fused_scaler.py plain unscale", skips=True, notes="two loops, one after the other"),
    _style(
        "gan.py",
        skips=True,
        notes="The window of an optimizer begins after the last step of any optimizer, so each "
        "step of D has the one micro-batch of D's loss, and each of G the one of G's. That D has "
        "a forward on real and one on fake data before its one backward makes no second "
        "micro-batch. G's gradients in D, cleared by D's zero_grad, are no discarded window: "
        "their window ended at G's step.",
    ),
    _style("three_optimizers.py", notes="steps without a micro-batch between them share a window"),
    _style(
        "encoder_decoder.py",
        notes="The decoder's forward follows no backward and so begins no micro-batch.",
    ),
    _style(
        "closure.py lbfgs",
        notes="Each evaluation of the closure is a micro-batch of the step around it. The "
        "closure's zero_grad discards nothing: the step goes on.",
    ),
    _style("closure.py sgd"),
    _style("compiled_model.py wrapped", compiled=True),
    _style("compiled_model.py in_place", compiled=True),
    _style(
        "compiled_loss.py",
        compiled=True,
        notes="No eager root forward: each outermost backward is a micro-batch.",
    ),
    _style(
        "compiled_step.py",
        compiled=True,
        known="Dynamo sees one more frame: our zero_grad stands outside torch's own disabled one",
    ),
    _style("compiled_optimizer.py", compiled=True),
    _style("loader_workers.py fork"),
    _style("loader_workers.py spawn"),
    _style("get_batch.py"),
    _style(
        "checkpointing.py",
        notes="Reentrant checkpointing calls backward within a backward and runs inner forwards "
        "again: no micro-batches of their own.",
    ),
    _style("backward_list.py"),
    _style(
        "several_losses.py retain",
        notes="Two backwards after one forward are one micro-batch, whose loss is their sum.",
    ),
    _style("several_losses.py list", notes="one micro-batch, whose loss is the sum of the list"),
    _style("zeroing.py", notes="four loops, one after the other"),
    _style("edited_gradients.py"),
    _style(
        "autograd_grad.py",
        unseen=True,
        notes="A step without a backward: nothing says how many micro-batches it had.",
    ),
    _style("manual_update.py", notes="No optimizer, no step; but it did train: not never_trained."),
    _style("optimizer_subclass.py", notes="the plain AdamW beside it never steps"),
    _style("own_optimizer.py"),
    _style(
        "optimizer_in_backward.py",
        notes="Each parameter's optimizer steps inside the one backward: the micro-batch counts "
        "in full for each of them, although backward has not returned.",
    ),
    _style("copies.py", notes="forwards of copies without a backward are no micro-batches"),
    _style(
        "skip_by_script.py",
        notes="Two micro-batches thrown away: a discarded window, in no step.",
    ),
    _style(
        "grad_on_evaluation.py",
        notes="Forwards with gradients on but without a backward are no micro-batches.",
    ),
    _style("endings.py exception", exit_code=1, state="crashed"),
    _style(
        "endings.py forward",
        exit_code=1,
        state="crashed",
        through_modules=True,
        own_interpreter=True,
        notes="An error inside a forward whose module has hooks shows more frames of torch's own.",
    ),
    _style("endings.py exit", exit_code=3, state="crashed"),
    _style("endings.py excepthook", exit_code=1, state="crashed"),
    _style(
        "spawned_helper.py",
        notes="the parent is watched, what the child trains is not",
    ),
    _style(
        "spawned_trainer.py",
        notes="The first process to make an optimizer is the one watched: here the child.",
    ),
    _style("never_trains.py", state="never_trained"),
    _style("without_torch.py", state="never_trained", own_interpreter=True),
    _style("custom_function.py"),
    _style("nan_loss.py", notes="without a scaler a step with NaN gradients is applied"),
    _style("ddp.py"),
    _style("scheduler_first.py"),
    _style("empty_clip.py"),
    _style("sparse_adam.py"),
    _style("complex_parameters.py"),
    _style("meta_parameters.py"),
    _style("frozen.py"),
    _style("eval_mode.py", notes="no training forward is seen: each outermost backward is one"),
)
