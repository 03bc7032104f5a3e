"""A rank cuts two values out of its contract as the whole reading of it would."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from saferun.inject import contract

NAMES = ("receipts", "attempt")


@pytest.mark.parametrize("text", ["", "{broken", "[]", '{"v":2,"attempt":"x"}', "null"])
def test_what_is_no_contract_has_no_directory(interpreters, text):
    with pytest.raises(ValueError):
        contract.receipt_location(text)
    environ = interpreters.environ(None, RANK="0", SAFERUN_INJECT=text)
    ran = interpreters.run("print('ran')", environ=environ)
    assert (ran.out, ran.err) == ("ran\n", "")


@given(
    attempt=st.integers(0, 10**6),
    receipts=st.none() | st.text(),
    run=st.text(),
    hooks=st.dictionaries(st.text() | st.sampled_from(NAMES), st.text() | st.integers()),
    mitigations=st.lists(st.text('"\\:,{}receiptsattempt')),
)
def test_cutting_a_contract_agrees_with_reading_it(**whole: object):
    text = contract.encode(**whole)
    read = contract.decode(text)
    for written in (text, json.dumps(read)):
        assert contract.receipt_location(written) == (read["receipts"], read["attempt"])
