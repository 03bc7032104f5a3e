"""What a check of the machine or of the settings found: the one value that such pages print."""

from typing import NamedTuple

OK = "ok"
NOTE = "note"
PROBLEM = "problem"


class Finding(NamedTuple):
    """One thing found.

    `level` is `ok`, `note` or `problem`; `area` names what was looked at ("settings", "driver",
    "GPU 3"); `what` is the finding in one line; `detail` holds the reasons and where they stand
    written, and `mend` what to do about it (both may be empty).
    """

    level: str
    area: str
    what: str
    detail: str
    mend: str
