"""A rank cuts two values out of its contract as the whole reading of it would."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from interpreters import Interpreters

from saferun.inject import contract

ODD_CONTRACTS = [
    {"receipts": None},
    {"receipts": "/r"},
    {"receipts": '/with "quotes" and \\ and \n'},
    {"receipts": "/ümlaut \udcff"},
    {"receipts": "/r", "hooks": {"receipts": "/other", "attempt": 9}},
    {"receipts": None, "hooks": {"receipts": "/other", "attempt": 9}},
    {"receipts": "/r", "mitigations": ['"attempt":9,"receipts":"/other"', "x\\"]},
    {"receipts": "/r", "run": '","receipts":"/other'},
    {"receipts": "/r", "attempt": 1234567},
]


@pytest.mark.parametrize("odd", ODD_CONTRACTS, ids=str)
def test_the_directory_and_the_attempt_are_cut_out_of_a_contract_exactly(odd: dict) -> None:
    whole = {"run": "r", "attempt": 3, "hooks": {"a": {"b": 1}}, "mitigations": [], **odd}
    text = contract.encode(**whole)
    expected = (whole["receipts"], whole["attempt"])
    assert contract.receipt_location(text) == expected
    assert contract.receipt_location(json.dumps(json.loads(text))) == expected


@pytest.mark.parametrize("text", ["", "{broken", "[]", '{"v":2,"attempt":"x"}', "null"])
def test_what_is_no_contract_has_no_directory(interpreters: Interpreters, text: str) -> None:
    with pytest.raises(ValueError):
        contract.receipt_location(text)
    environ = interpreters.environ(None, RANK="0", SAFERUN_INJECT=text)
    ran = interpreters.run("print('ran')", environ=environ)
    assert (ran.out, ran.err) == ("ran\n", "")


@given(
    attempt=st.integers(0, 10**6),
    receipts=st.none() | st.text(),
    run=st.text(),
    hooks=st.dictionaries(st.text() | st.just("receipts"), st.text() | st.integers()),
    mitigations=st.lists(st.text('"\\:,{}receiptsattempt')),
)
def test_cutting_a_contract_agrees_with_reading_it(**whole: object) -> None:
    text = contract.encode(**whole)
    read = contract.decode(text)
    assert contract.receipt_location(text) == (read["receipts"], read["attempt"])
