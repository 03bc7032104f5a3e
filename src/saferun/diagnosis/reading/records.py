"""Pure: the lines inside a structured log record: JSON of any logger, or torch's error file.

A traceback in a record is one line of the log with escaped newlines. Once unpacked, it is read like
any other. Records that report no problem stay as they are.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Sequence

from saferun.diagnosis.reading.log_lines import Line

_RECORD_CHARS = 200_000  # longer lines are not unpacked
_DEPTH = 4  # levels of nested objects that are searched
_LINES = 400  # lines kept of one record: its first and its last ones
_WRONG = re.compile(
    r'\\n|"(?:error|err|critical|fatal|warning|warn|alert|emergency|panic|e|f)"'
    r"|\w(?:Error|Exception)\b",
    re.I,
)
_TEXT = re.compile(
    r"(?:message|msg|event|log|text|textpayload|detail|details|reason|error|err|exception|exc|"
    r"exc_info|exc_text|exception\.\w{1,20}|error\.\w{1,20}|traceback|py_callstack|stack|"
    r"stacktrace|stack_info|stack_trace|extrainfo|jsonpayload|body|data)\Z",
    re.I,
)
_TRACE = re.compile(r"exc_info|exc_text|trace|stack", re.I)
_RANK = re.compile(r"(?:global_)?rank\Z", re.I)
# Keys that a record may have beside its text. One with other keys (a step, a loss) stays as it is.
_BESIDE = re.compile(
    r"(?:@?timestamp|ts|time|asctime|date|receivetimestamp|insertid|logname|name|logger|logger_name|"
    r"level|levelname|severity|lvl|loglevel|stream|pipe|kubernetes|labels|resource|host|hostname|pid|"
    r"process|thread|threadname|module|filename|file|line|lineno|funcname|pathname|container|pod|"
    r"namespace|source|(?:global_|local_)?rank|attrs|docker|tag|_p)\Z",
    re.I,
)
# The name of an event, if a runner has the output line beside it as `data`.
_NAME_OF_TEXT = re.compile(r"\w{1,20}\Z")
# The level that a program gave to its own line. A collector's level for stderr says nothing.
_LEVELS = {"info": "INFO", "debug": "INFO", "warning": "WARNING", "warn": "WARNING"}
_OWN_LEVEL = re.compile(r"(?:level|levelname|lvl|loglevel)\Z", re.I)
_EXCEPTION = re.compile(r"\s{0,20}[\w.]{0,120}(?:Error|Exception)\b[:(]")
_NO_SENTENCE = re.compile(r"\s|Traceback|\[|[\w.]{1,120}(?:Error|Exception)\b|\{")
_ESCAPED = re.compile(r"(?:\\){1,4}(?:r(?:\\){1,4})?n")
# A text without that head, in which a line is a frame or an exception.
_ESCAPED_LINE = re.compile(
    r"(?:\\){1,4}n['\", ]{0,6}"
    r"(?:[\w.]{0,120}(?:Error|Exception)(?::|(?:\\){1,4}n)|File (?:\\){0,4}\")"
)
_ESCAPES = 3  # so many make a line an escaped text; a source line may have one
_BETWEEN = re.compile(r"^['\"], ['\"]")  # between two strings of a list
_STRING = re.compile(r"\s{0,40}(?P<text>\"(?:[^\"\\]|\\.){1,3900}\"),?\s{0,4}$")  # a list's, alone
# The exception in torch's error file, printed over several lines, and the frames below it.
_MEMBER = re.compile(
    r'\s{1,20}"message": (?P<text>"[\w.]{1,120}(?:Error|Exception)\b(?:[^"\\]|\\.){0,3900}")'
    r",?\s{0,4}$"
)
_FRAMES = '"py_callstack": ['
_ABOVE_FRAMES = 3  # most lines from the exception down to its frames
_END = re.compile(r'"[\s,}\]]{0,12}$')  # the end of a record after its last text
_HEAD = "Traceback (most recent call last):"


def unpack(text: str) -> tuple[int | None, list[str]] | None:
    """Return a record's rank and lines; None if it is no record, or reports no problem.

    A record that only wraps a line with its time is unpacked in any case.

    >>> unpack('{"level": "error", "msg": "stopped", "exc_info": "E\\\\nKeyError: 1", "rank": 3}')
    (3, ['stopped', 'E', 'KeyError: 1'])
    >>> unpack('{"level": "info", "msg": "step 3", "loss": 2.5}')
    """
    if len(text) > _RECORD_CHARS:
        return None
    at = text.find("{")
    if 0 <= at <= 200 and text.endswith("}") and '":' in text:
        try:
            record = json.loads(text[at:])
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and _is_of_text(record, text) and (lines := _lines(record)):
            return _rank(record), _bounded(lines)
    return _unescaped(text)


def in_order(lines: list[Line]) -> Sequence[Line]:
    """Return the lines with the exception of torch's error file moved below its frames.

    Args:
        lines: the log's lines, unpacked; an error file printed over several lines has it above
            them.
    """
    for at in [at for at, line in enumerate(lines) if line.text.endswith(_FRAMES)]:
        above = range(at - 1, max(-1, at - 1 - _ABOVE_FRAMES), -1)
        stated = next((row for row in above if _EXCEPTION.match(lines[row].text)), None)
        if stated is None:
            continue
        end = at + 1
        while (
            end < len(lines)
            and lines[end].text.startswith("  ")
            and lines[end].text.strip(" ,") != "]"
        ):
            end += 1
        lines[stated:end] = [*lines[stated + 1 : end], lines[stated]]
    return lines


def _is_of_text(record: dict[str, object], text: str) -> bool:
    """Return whether a record reports a problem, or only wraps a line with its time."""
    beside = all(_TEXT.match(key) or _BESIDE.match(key) for key in record)
    return beside or _WRONG.search(text) is not None


def _unescaped(text: str) -> tuple[int | None, list[str]] | None:
    """Return the lines of a text with escaped newlines, even if the record is cut."""
    at = text.find(_HEAD)
    if at >= 0 and _ESCAPED.match(text, at + len(_HEAD)):
        before, trace = text[:at], text[at:].replace('\\"', '"')
        return None, _bounded([before, *_unlisted(_ESCAPED.split(_END.sub("", trace)))])
    if text.count("\\n") >= _ESCAPES and _ESCAPED_LINE.search(text):
        return None, _bounded(_unlisted(_ESCAPED.split(text.replace('\\"', '"'))))
    if (found := _STRING.fullmatch(text) or _MEMBER.fullmatch(text)) is not None:
        with contextlib.suppress(ValueError):
            return None, str(json.loads(found["text"])).splitlines()
    return None


def _unlisted(lines: list[str]) -> list[str]:
    """Return lines without the list syntax between strings, as in a list of a traceback's lines."""
    return [_BETWEEN.sub("", line) for line in lines]


def _bounded(lines: list[str]) -> list[str]:
    return lines if len(lines) <= _LINES else lines[: _LINES // 2] + lines[-_LINES // 2 :]


def _lines(record: dict[str, object]) -> list[str]:
    level = next((str(v).lower() for k, v in record.items() if _OWN_LEVEL.match(k)), "")
    texts = _texts(record, _DEPTH)
    if texts and texts[-1][0] and texts[-1][1].rstrip().rsplit("\n", 1)[-1].startswith(" "):
        texts.sort(key=lambda item: _EXCEPTION.match(item[1]) is not None)  # after its frames
    lines = [line for _, text in texts for line in text.splitlines() if line.strip()]
    lines = [part for line in lines for part in (_unescaped(line) or (None, [line]))[1]]
    if level in _LEVELS and lines and not _NO_SENTENCE.match(lines[0]):
        lines[0] = f"{_LEVELS[level]}: {lines[0]}"
    return lines


def _texts(record: dict[str, object], depth: int) -> list[tuple[bool, str]]:
    """Return the texts in the record's fields, tracebacks last."""
    found: list[tuple[bool, str]] = []
    for key, value in record.items():
        # A text of several lines, or an exception, counts whatever the field's name.
        holds = isinstance(value, str) and ("\n" in value.strip() or _EXCEPTION.match(value))
        if not _TEXT.match(key) and not holds:
            continue
        if key == "event" and "data" in record and _NAME_OF_TEXT.match(str(value)):
            continue
        if isinstance(value, list):
            value = "\n".join(item for item in value if isinstance(item, str))
        if isinstance(value, str) and value:
            found.append((_TRACE.search(key) is not None or _HEAD in value, value))
        elif isinstance(value, dict) and depth:
            found += _texts(value, depth - 1)
    return sorted(found, key=lambda item: item[0])


def _rank(record: dict[str, object]) -> int | None:
    value = next((value for key, value in record.items() if _RANK.match(key)), None)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
