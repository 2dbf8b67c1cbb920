"""The grammar of --inject: what is meant is read, what is not is quoted in one line."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpwatch import faults
from mpwatch.errors import UsageError
from mpwatch.faults import Fault
from mpwatch.vocabulary import FAULTS, FAULTS_TO_COME


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("overflow@step=5", Fault(name="overflow", first_step=5, last_step=5)),
        ("overflow@step=5..9,micro=2,param=head.weight,rank=1",
         Fault(name="overflow", first_step=5, last_step=9, micro=2, param="head.weight", rank=1)),
        ("nan@step=1,module=blocks.0", Fault(name="nan", first_step=1, last_step=1,
                                             module="blocks.0")),
        ("slow@step=3,phase=data", Fault(name="slow", first_step=3, last_step=3, phase="data")),
        ("kill@step=10", Fault(name="kill", first_step=10, last_step=10)),
        ("hub-kill@step=10", Fault(name="hub-kill", first_step=10, last_step=10)),
    ],
)  # fmt: skip
def test_faults_are_read(text: str, fault: Fault) -> None:
    assert faults.parse(text) == fault
    assert faults.text_of(fault) == text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "there are: overflow"),
        ("fire@step=1", "no fault 'fire'"),
        ("overflow", "say when"),
        ("overflow@", "cannot read ''"),
        ("overflow@micro=1", "step=S or step=A..B is missing"),
        ("overflow@step=0", "no number from 1"),
        ("overflow@step=9..5", "runs backwards"),
        ("overflow@step=1..", "no number"),
        ("overflow@step=1,step=2", "given twice"),
        ("overflow@step=1,colour=red", "cannot read"),
        ("overflow@step=1,module=x", "overflow takes no module="),
        ("kill@step=1,micro=2", "kill takes no micro="),
        ("slow@step=1,phase=lunch", "no phase 'lunch'"),
        ("overflow@step=99999999999999999999", "no number"),
        ("overflow@step=\u0661", "no number"),
        *((f"{name}@step=1", "not built") for name in sorted(FAULTS_TO_COME)),
    ],
)
def test_what_is_no_fault_is_quoted(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as refused:
        faults.parse(text)
    assert "\n" not in str(refused.value)


PARTS = ["@", "=", ",", "..", "step", "micro", "phase", "param", "1", "2", "9", "x"]


@given(
    st.sampled_from(sorted(FAULTS)) | st.text(max_size=8),
    st.lists(st.sampled_from(PARTS), max_size=12),
)
def test_any_text_is_read_or_refused(name: str, parts: list[str]) -> None:
    text = name + "".join(parts)
    try:
        fault = faults.parse(text)
    except UsageError:
        return
    assert 1 <= fault.first_step <= fault.last_step
    assert fault.names_step(fault.first_step)
    assert not fault.names_step(fault.last_step + 1)
