"""The lock of a C++ extension's build goes with its owner, also where that was killed."""

import json

import rights
from repo import ROOT

PROGRAM = str(ROOT / "tests" / "programs" / "inject" / "build_locks.py")


def test_a_lock_is_taken_from_an_owner_that_was_killed_and_from_no_other(interpreters):
    ran = interpreters.run(argv=(PROGRAM,), hooks={})
    wanted = {
        "died": [9, True],
        "of the dead": True,
        "of the living": 0,
        "released": True,
        "of nobody": [[False, True]] * 3,
    }
    if not rights.missing("become others"):
        wanted["of another user"] = False
    assert (json.loads(ran.out), ran.err) == (wanted, "")
