"""Pure: find text in bytes that looks like a secret by its surroundings or its shape.

`find` yields spans (begin, end) of credentials in URLs; tokens of well-known shape; private keys;
and `NAME=value`, `"name": "value"` and `--name value` if the name means a secret. Each rule
examines a byte a limited number of times, so no input takes more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from saferun.system.secret_names import STRONG, is_plain, tells
from saferun.system.secret_shapes import BEGINNINGS, SURROUNDINGS

Span = tuple[int, int]
STAR = b"***"  # the mask; masked text is not found again
_KEY_LINES = 200  # masked if a private key's first line is lost; RSA-16384 has 195


def _pattern(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.VERBOSE)


def find(data: bytes) -> Iterator[Span]:
    """Yield the spans of text that looks like a secret; they may overlap."""
    yield from _in_urls(data)
    yield from _shapes(data)
    yield from _private_keys(data)
    yield from _tables(data)
    if any(c in data for c in b"=:-"):
        lower = data.lower()  # ASCII only, so that offsets stay equal
        yield from _named(data, lower)
        yield from _options(data, lower)


def _kept(span: Span, data: bytes) -> Iterator[Span]:
    """Yield a span, unless it is empty or already masked."""
    if span[0] < span[1] and data[span[0] : span[1]] != STAR:
        yield span


def _in_urls(data: bytes) -> Iterator[Span]:
    """Yield the secret of `scheme://user:secret@host`, or of a user part that is itself a token."""
    if b"://" not in data:
        return
    userinfo = rb"""://(?: [^\s/?\#@:'"<>\\]{0,256} : ([^\s/'"<>\\]{1,1024}) @
                         | ([A-Za-z0-9_-]{20,256}) @ )"""
    for match in _pattern(userinfo).finditer(data):
        yield from _kept(match.span(match.lastindex or 0), data)


def _shapes(data: bytes) -> Iterator[Span]:
    """Yield tokens that are known by their beginning, but not in the middle of a longer word."""
    for begin, whole in BEGINNINGS:
        if begin in data:
            alone = rb"(?<![A-Za-z0-9_-]" + re.escape(begin) + rb")"
            pattern = re.escape(begin) + alone + whole[len(begin) :]
            yield from (match.span() for match in _pattern(pattern).finditer(data))
    for word, whole in SURROUNDINGS:
        if word in data:
            yield from (match.span(1) for match in _pattern(whole).finditer(data))


def _private_keys(data: bytes) -> Iterator[Span]:
    """Yield the text between the BEGIN and END lines of a private key, or all after BEGIN."""
    if b"PRIVATE KEY" not in data:
        return
    done = 0
    line = rb"-----(BEGIN|END)[ ][A-Z ]{0,32}PRIVATE[ ]KEY(?:[ ]BLOCK)?-----"
    for match in _pattern(line).finditer(data):
        if match.start() < done:
            continue
        if match[1] == b"END":  # a tail may have lost the first line
            yield from _kept((_base64_begins(data, match.start(), done), match.start()), data)
            done = match.end()
        else:
            end = data.find(b"-----END", match.end())
            done = len(data) if end < 0 else end
            yield from _kept((match.end(), done), data)


def _base64_begins(data: bytes, end: int, floor: int) -> int:
    """Return where the base64 lines above this place begin, at most _KEY_LINES of them."""
    begin = end
    for _ in range(_KEY_LINES):
        above = max(floor, data.rfind(b"\n", floor, max(floor, begin - 1)) + 1)
        whole = _pattern(rb"[A-Za-z0-9+/=]{1,128}\s*").fullmatch(data, above, begin)
        if above >= begin or not whole:
            break
        begin = above
    return begin


def _tables(data: bytes) -> Iterator[Span]:
    """Yield values in a table: `| HF_TOKEN | … |`; a lower-case name may be a heading."""
    row = rb"""(?<![A-Z0-9_]) ([A-Z][A-Z0-9_]{2,63}) [ \t]{1,60}
               (?: \| | \xe2\x94[\x82\x83]) [ \t]{1,60} ([^\s|\xe2]{8,512})"""
    if b"|" in data or b"\xe2\x94" in data:
        for match in _pattern(row).finditer(data):
            name = match[1].decode("latin-1")
            if tells(name, False) and not is_plain(match[2].decode("latin-1"), name):
                yield from _kept(match.span(2), data)


_AFTER_NAME = rb"""  # the rest of a name, and what is between it and the value
    [a-z0-9_.-]{0,40} (?![a-z0-9_.-]) (?: \x1b \[ [0-9;]{0,16} m){0,3} (?:\\{0,3}["'])? \]?
    [ \t]{0,4} (?:=>?(?!=)|:(?!:)) [ \t]{0,4}
"""
_NO_NUMBER = (
    rb"""(?! [ \t]{0,4} [0-9][0-9.,_]{0,11} (?:[\s;)\]}]|\Z))"""  # tokens=4096 in every line
)
_NAMES: tuple[tuple[bytes, bytes], ...] = (  # one pattern each: re is fast if a literal leads
    (b"key", _AFTER_NAME + _NO_NUMBER),
    (b"token", _AFTER_NAME + _NO_NUMBER),
    *((word.encode(), _AFTER_NAME) for word in (*STRONG, "authorization", "signature")),
    (b"sig", rb"(?==)" + _AFTER_NAME),
)
_VALUE = rb"""  # in quotes, in the escaped quotes of JSON within JSON, or up to a blank
    [bfru]{0,2} " ([^"\\\r\n]* (?:\\.[^"\\\r\n]*)*)
  | [bfru]{0,2} ' ([^'\\\r\n]* (?:\\.[^'\\\r\n]*)*)
  | \\{1,3}["'] ([^"'\\\r\n]*)
  | ([^\s"'`\\]* (?:\\(?![nrt"'\\])[^\s"'`\\]*)*)
"""
_SCHEME = rb"""(?: [bfru]{0,2} \\{0,3} ["'])? (?:[Bb]earer|[Bb]asic|[Tt]oken|[Dd]igest) [ \t]+"""


def _named(data: bytes, lower: bytes) -> Iterator[Span]:
    """Yield values: `NAME_TOKEN=…`, `"api_key": "…"`, `?token=…`, `Authorization: Bearer …`."""
    for word, after in _NAMES:
        if word in lower:
            yield from _named_by(_pattern(word + after), data, lower)


def _named_by(pattern: re.Pattern[bytes], data: bytes, lower: bytes) -> Iterator[Span]:
    match = pattern.search(lower)
    while match:
        begin = _name_begins(data, match.start())
        name = _word(data, begin, match.end())
        at = match.end()
        in_query = data[begin - 1 : begin] in (b"?", b"&") and begin > 0
        if in_query or name.lower() == "authorization" or tells(name, _is_loose(name)):
            span = _value_at(data, at, name, in_query)
            yield from _kept(span, data)
            at = max(at, span[1])
        match = pattern.search(lower, at)


def _name_begins(data: bytes, at: int) -> int:
    """Return where the name around this place begins, at most 48 bytes before it."""
    low = max(0, at - 48)
    head = data[low:at]
    return low + len(
        head.rstrip(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
    )


def _word(data: bytes, begin: int, end: int) -> str:
    name = data[begin:end].split(b"=")[0].split(b":")[0].split(b"\x1b")[0]
    return name.strip(b" \t\\\"']").decode("latin-1")


def _is_loose(name: str) -> bool:
    return name != name.upper()


def _value_at(data: bytes, at: int, name: str, in_query: bool) -> Span:
    """Return the span of the secret value here; an empty span if there is none."""
    if in_query:
        match = _pattern(rb"""[^\s&\#"'<>\\]*""").match(data, at)
        return match.span() if match else (at, at)
    scheme = _pattern(_SCHEME).match(data, at)
    if scheme:
        rest = _pattern(rb"""[^\r\n"'\\]+""").match(data, scheme.end())
        return rest.span() if rest else (at, at)
    match = _pattern(_VALUE).match(data, at)
    if not match:
        return at, at
    begin, end = match.span(match.lastindex or 0)
    if match.lastindex == 4:  # unquoted: without the end of a call, list or sentence
        end = begin + len(data[begin:end].rstrip(b",;)]}>."))
    value = data[begin : min(end, begin + 256)].decode("latin-1")
    weak = name.lower() in ("token", "tokens", "authorization") and data[at - 1 : at] != b"="
    if is_plain(value, name) or (weak and _is_loose(name) and not _looks_random(value)):
        return end, end
    return begin, end


def _looks_random(value: str) -> bool:
    """Return whether a value is not an ordinary word: long, unbroken, with a digit."""
    return bool(re.match(r"(?=.*[0-9])[^\s<>(){}\[\]]{8,}|[^\s<>(){}\[\]]{24,}", value))


def _options(data: bytes, lower: bytes) -> Iterator[Span]:
    """Yield values: `--hf-token …` and `'--hf-token', '…'`; `_named` finds `--token=…`."""
    if b"--" not in data:
        return
    option = rb"""-- ([a-z][a-z0-9_.-]{0,63}) (?![a-z0-9_.-])
                  (?: [ \t]+ | \\{0,3}["'] [ ]? , \s{0,4} ) (?! \\{0,3}["']? --)"""
    for match in _pattern(option).finditer(lower):
        name = _word(data, match.start(1), match.end(1))
        if tells(name, False):
            value = _pattern(_VALUE).match(data, match.end())
            if value and not is_plain(value[value.lastindex or 0][:256].decode("latin-1"), name):
                yield from _kept(value.span(value.lastindex or 0), data)
