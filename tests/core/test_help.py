"""What the command line says of itself: every allowed word, and no verb that is not for people."""

import argparse

import pytest

from mpwatch import vocabulary
from mpwatch.cli import main, options
from mpwatch.cli.configuration import unknown_variables

LISTED = {
    "--precision": (*vocabulary.PRECISIONS, *vocabulary.HALF_DTYPES),
    "--scaler": vocabulary.SCALERS,
    "--schedule": vocabulary.SCHEDULES,
    "--lr-rule": vocabulary.LR_RULES,
    "--locate": vocabulary.LOCATE_MODES,
    "--growth-interval": vocabulary.INTERVAL_UNITS,
    "--on-nonfinite": ("warn", "skip", "stop"),
    "--at-floor": ("warn", "stop"),
    "--at-ceiling": ("warn", "stop"),
    "--inject": ("overflow", "nan", "kill", "slow", "hub-kill", "hub-stop"),
}


def helped() -> dict[str, str]:
    """flag: its line, as argparse prints it"""
    parser = argparse.ArgumentParser()
    options.add_to(parser)
    parser.format_help()
    return {action.option_strings[-1]: action.help or "" for action in parser._actions}


def test_every_allowed_word_stands_in_the_help() -> None:
    lines = helped()
    for flag, words in LISTED.items():
        said = set(lines[flag].replace(",", " ").replace(":", " ").split())
        assert set(words) <= said, flag
    # Words that this version refuses are not offered.
    assert "rollback" not in lines["--on-nonfinite"]
    assert "disk-full" not in lines["--inject"]
    assert "checkpoint" not in lines["--at-floor"]


def test_every_option_of_words_is_in_the_list_above() -> None:
    assert {option.flag for option in options.OPTIONS if option.words} == set(LISTED)


def test_defaults_are_told() -> None:
    lines = helped()
    assert lines["--grad-norm-every"].endswith(f"(default {vocabulary.GRAD_NORM_EVERY})")
    assert lines["--lr-rule"].endswith("(default none)")
    assert "default" not in lines["--headless"] + lines["--name"]


def test_a_mistyped_verb_is_told_the_verbs_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["shwo"]) == 2
    error = capsys.readouterr().err
    assert error == (
        "mpwatch: no verb 'shwo'; there are: run, attach, replay, ls, show, tail, ctl, config,"
        " plan\n"
    )


def test_variables_that_nothing_reads_are_named() -> None:
    variables = {option.variable for option in options.OPTIONS}
    right = {**dict.fromkeys(variables, "1"), "MPWATCH_DISABLED": "0", "MPWATCH_SERVE": "1"}
    # What our own processes hand on, and what is not ours.
    handed = {"_MPWATCH_AGENT": "{}", "PATH": "/bin", "MY_MPWATCH_X": "1"}
    assert unknown_variables({**right, **handed}) is None
    assert unknown_variables({**right, "MPWATCH_MAXSTEPS": "secret"}) == (
        "environment: MPWATCH_MAXSTEPS (is MPWATCH_MAX_STEPS meant?) is no variable of mpwatch and"
        " does nothing; see: mpwatch config"
    )
    two = unknown_variables({"MPWATCH_max_steps": "1", "MPWATCH_ZZZZZ\x1b[31m": "1"})
    assert two == (
        "environment: MPWATCH_ZZZZZ, MPWATCH_max_steps (is MPWATCH_MAX_STEPS meant?) are no"
        " variables of mpwatch and do nothing; see: mpwatch config"
    )
    many = unknown_variables({f"MPWATCH_{n}": "1" for n in range(9)})
    assert many is not None
    assert many.count("MPWATCH_") == 3
