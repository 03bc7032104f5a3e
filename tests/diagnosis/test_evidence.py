"""Error files of ranks, as they are read into Evidence."""

import json

import pytest
from job_logs import TRACEBACK

from saferun.diagnosis import evidence

ERROR_FILE = json.dumps(
    {
        "message": {
            "message": "KeyError: 'a'",
            "extraInfo": {
                "py_callstack": TRACEBACK + "KeyError: 'a'\n",
                "timestamp": "1754040000",
                "type": "KeyError",
                "time_s": 1754040000.25,
            },
        }
    }
)


@pytest.mark.parametrize(
    ("content", "time_s", "message"),
    [
        (ERROR_FILE, 1754040000.25, "KeyError: 'a'"),
        ('{"message": "plain text"}', None, "plain text"),
        ('{"message": {"extraInfo": 3}}', None, ""),
        ('{"message": {"message": "a", "extraInfo": {"timestamp": "17"}}}', 17.0, "a"),
        ("{", None, ""),
        ("[]", None, ""),
        (None, None, ""),
    ],
    ids=["complete", "text only", "odd", "an older torch", "cut", "a list", "no file"],
)
def test_an_error_file_is_read_as_far_as_it_can_be(content, time_s, message):
    found = evidence.rank_failure(2, content)
    assert (found.rank, found.time_s, found.message) == (2, time_s, message)
    assert found.type == ("KeyError" if content == ERROR_FILE else "")
    assert found.traceback == (f"{TRACEBACK}KeyError: 'a'\n" if content == ERROR_FILE else "")
