"""Pure: secrets never reach the disk. Finds them in names, words, text and bytes; puts `***` there.

What counts as a secret: the value of a variable or option whose *name* tells (DESIGN, *Journal*),
wherever it occurs; credentials in URLs; `NAME=value`, `"name": "value"` and `--name value` in text
where the name tells; tokens of well-known shape. A log must stay readable too: `max_tokens=512`,
`KeyError: 'lm_head.weight'` and `pad_token: '<pad>'` are no secrets, so in text a name is read word
by word and a value that cannot be a secret stays.

Everything is looked for in bytes: lowering and searching them is several times faster than in
`str`, and what is not UTF-8 passes as it is. Each rule yields spans; overlapping spans become one.
A rule looks at a byte a bounded number of times, so no input takes more than linear time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from saferun.system.secret_names import (
    SHORTEST,
    STRONG,
    compiled,
    is_path,
    is_plain,
    is_secret,
    tells,
)

MASK = "***"
SHORTEST_CUT = 4  # bytes that must be left of a value which the beginning of a tail cuts in two
_PASSES = 16  # what is masked is masked again until nothing changes; see `Masker._settle`
_STAR = MASK.encode()


@lru_cache(maxsize=64)
def _bytes_pattern(pattern: bytes) -> re.Pattern[bytes]:
    return re.compile(pattern, re.VERBOSE)


class Masker:
    """Masks the secrets of one run: those that it was given, and what looks like one.

    Args:
        environ: the exported environment; values of telling names are looked for everywhere.
        words: the command line; so are the values of telling options.
    """

    __slots__ = ("_in_data", "_in_text")

    def __init__(self, environ: Mapping[str, str], words: Sequence[str]) -> None:
        found = [(name, value) for name, value in environ.items() if tells(name, False)]
        found += _pairs(words)
        for text in (*environ.values(), *words):
            found += [("password", value) for value in _url_passwords(text)]
        values = {value for name, given in found for value in _values(name, given)}
        forms = {form for value in values for form in _forms(value)}
        self._in_data = _encoded(forms, "surrogateescape")
        self._in_text = _encoded(forms, "surrogatepass")

    def text(self, text: str) -> str:
        """Return text without secrets; text that has none comes back as it is."""
        raw = text.encode("utf-8", "surrogatepass")
        masked = self._settle(raw, self._in_text)
        return text if masked == raw else masked.decode("utf-8", "surrogatepass")

    def data(self, data: bytes) -> bytes:
        """Return bytes (the tail of a stream) without secrets, whatever their encoding.

        A secret that the beginning of the tail cuts in two is masked as well.
        """
        return self._settle(_uncut(data, self._in_data), self._in_data)

    def setting(self, name: str, value: str) -> str:
        """Return a variable's value, masked whole where the variable's name is a secret's."""
        return MASK if value and is_secret(name) else self.text(value)

    def words(self, words: Sequence[str]) -> list[str]:
        """Return a command line without secrets; as many words as before."""
        masked: list[str] = []
        for before, word in zip(["", *words], words, strict=False):
            name, equals, value = word.partition("=")
            if word and not _is_option(word) and _awaits_secret(before):
                masked.append(MASK)
            elif equals and value and _names_secret(name):
                masked.append(f"{name}={MASK}")
            else:
                masked.append(self.text(word))
        return masked

    def _settle(self, data: bytes, forms: Sequence[bytes]) -> bytes:
        """Mask until nothing changes, so that masking twice is masking once.

        The second pass mostly finds nothing. Only a secret that itself holds stars can arise anew
        from a mask and its surroundings; should that not end, nothing of the text is kept.
        """
        for _ in range(_PASSES):
            spans = [*_occurrences(data, forms), *_structural(data)]
            masked = _replaced(data, spans)
            if masked == data:
                return data
            data = masked
        return _STAR


# What a run was given


def _is_option(word: str) -> bool:
    """Tell an option from a value that begins with a dash, as a random token may."""
    return compiled(r"--?[A-Za-z][\w.-]*(=.*)?").fullmatch(word) is not None and (
        word.startswith("--") or len(word) < SHORTEST
    )


def _names_secret(name: str) -> bool:
    """Say whether `name=value` among the words sets a secret: an option, a variable, a key."""
    return compiled(r"[-+]*[\w.-]+").fullmatch(name) is not None and tells(name, False)


def _awaits_secret(option: str) -> bool:
    """Say whether the word after this one is a secret: `--hf-token`, `-token`."""
    return option.startswith("-") and "=" not in option and _names_secret(option)


def _pairs(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return (name, value) of the telling options and assignments of a command line."""
    found = []
    for before, word in zip(["", *words], words, strict=False):
        name, equals, value = word.partition("=")
        if not _is_option(word) and _awaits_secret(before):
            found.append((before, word))
        elif equals and _names_secret(name):
            found.append((name, value))
    return found


def _url_passwords(text: str) -> list[str]:
    if "://" not in text or "@" not in text:
        return []
    return compiled(r"://[^\s/?#@:'\"<>]{0,256}:([^\s/'\"<>]+)@").findall(text)


def _values(name: str, given: str) -> Iterator[str]:
    """Yield what of a secret's value is looked for in text: whole, and line by line (PEM, JSON)."""
    value = given.strip()
    if len(value) < SHORTEST or is_plain(value, name) or is_path(value, name):
        return
    yield value
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line.strip() for line in lines if len(line.strip()) >= 2 * SHORTEST)


def _forms(value: str) -> set[str]:
    """Return a value as it is and as URLs, JSON, Python and the shell write it."""
    forms = {value}
    if compiled(r"[\w.~-]*").fullmatch(value) and value.isascii():
        return forms
    raw = value.encode("utf-8", "surrogateescape" if _is_escaped(value) else "surrogatepass")
    for kept in (b"", b"/", b"/:@!$&'()*,;=+"):
        quoted = "".join(_percent(byte, kept) for byte in raw)
        forms |= {quoted, compiled("%..").sub(lambda m: m[0].lower(), quoted)}
        forms.add(quoted.replace("%20", "+"))
    import json

    forms |= {json.dumps(value, ensure_ascii=ascii)[1:-1] for ascii in (True, False)}
    forms |= {repr(value)[1:-1], value.replace("'", "'\"'\"'"), value.replace("/", "\\/")}
    return forms


def _is_escaped(value: str) -> bool:
    """Say whether all lone surrogates stand for bytes, as in `os.environ`."""
    return not compiled("[\ud800-\udc7f\udd00-\udfff]").search(value)


def _percent(byte: int, kept: bytes) -> str:
    char = chr(byte)
    plain = char.isascii() and (char.isalnum() or char in "-._~" or byte in kept)
    return char if plain else f"%{byte:02X}"


def _encoded(forms: set[str], errors: str) -> tuple[bytes, ...]:
    """Encode what can be encoded, the longest first."""
    found = set()
    for form in forms:
        try:
            found.add(form.encode("utf-8", errors))
        except UnicodeEncodeError:  # not the bytes of anything that the kernel hands us
            continue
    return tuple(sorted(found, key=lambda form: (-len(form), form)))


def _uncut(data: bytes, forms: Sequence[bytes]) -> bytes:
    """Mask the end of a secret with which the data begin."""
    for form in forms:
        for start in range(1, len(form) - SHORTEST_CUT + 1):
            if data.startswith(form[start:]):
                return _STAR + data[len(form) - start :]
    return data


# Spans: (begin, end) of what is masked

_Span = tuple[int, int]


def _replaced(data: bytes, spans: list[_Span]) -> bytes:
    """Put a mask over each span; spans that touch or overlap share one."""
    if not spans:
        return data
    spans.sort()
    pieces, done = [], 0
    begin, end = spans[0]
    for next_begin, next_end in [*spans[1:], (len(data) + 1, 0)]:
        if next_begin <= end:
            end = max(end, next_end)
            continue
        pieces += [data[done:begin], _STAR]
        done, begin, end = end, next_begin, next_end
    return b"".join([*pieces, data[done:]])


def _occurrences(data: bytes, forms: Sequence[bytes]) -> Iterator[_Span]:
    for form in forms:
        at = data.find(form)
        while at >= 0:
            yield at, at + len(form)
            at = data.find(form, at + len(form))


def _structural(data: bytes) -> Iterator[_Span]:
    """Yield what looks like a secret by its surroundings or its shape."""
    yield from _in_urls(data)
    yield from _shapes(data)
    yield from _private_keys(data)
    if any(c in data for c in b"=:-"):
        lower = data.lower()  # ASCII only, so that offsets stay
        yield from _named(data, lower)
        yield from _options(data, lower)


def _kept(span: _Span, data: bytes) -> Iterator[_Span]:
    """Drop a span that is empty or masked already."""
    if span[0] < span[1] and data[span[0] : span[1]] != _STAR:
        yield span


def _in_urls(data: bytes) -> Iterator[_Span]:
    """`scheme://user:secret@host`, and a user part that is itself a token."""
    if b"://" not in data:
        return
    userinfo = rb"""://(?: [^\s/?\#@:'"<>\\]{0,256} : ([^\s/'"<>\\]{1,1024}) @
                         | ([A-Za-z0-9_-]{20,256}) @ )"""
    for match in _bytes_pattern(userinfo).finditer(data):
        yield from _kept(match.span(match.lastindex or 0), data)


_SHAPES: tuple[tuple[bytes, bytes], ...] = (  # how a token begins, and the whole of it
    (b"hf_", rb"hf_(?:(?=[A-Za-z]{0,64}[0-9])[A-Za-z0-9]{12,}|[A-Za-z0-9]{30,})"),
    (b"gh", rb"gh[pousr]_[A-Za-z0-9]{20,}"),
    (b"github_pat_", rb"github_pat_[A-Za-z0-9_]{20,}"),
    (b"glpat-", rb"glpat-[A-Za-z0-9_-]{16,}"),
    (b"sk-", rb"sk-(?=[A-Za-z_-]{0,64}[0-9])[A-Za-z0-9_-]{16,}"),
    (b"xox", rb"xox[a-z]-[A-Za-z0-9-]{10,}"),
    (b"AKIA", rb"AKIA[0-9A-Z]{16}(?![0-9A-Za-z])"),
    (b"ASIA", rb"ASIA[0-9A-Z]{16}(?![0-9A-Za-z])"),
    (b"AIza", rb"AIza[0-9A-Za-z_-]{30,}"),
    (b"nvapi-", rb"nvapi-[A-Za-z0-9_-]{20,}"),
    (b"wandb_v1_", rb"wandb_v1_[A-Za-z0-9_]{20,}"),
    (b"npm_", rb"npm_[A-Za-z0-9]{30,}"),
    (b"dckr_pat_", rb"dckr_pat_[A-Za-z0-9_-]{16,}"),
    (b"eyJ", rb"eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}(?:\.[A-Za-z0-9_-]*)?"),
)
_AFTER_WORDS: tuple[tuple[bytes, bytes], ...] = (  # a word that tells, then the token (group 1)
    (b"earer", rb"[Bb]earer[ \t]{1,4}([A-Za-z0-9._~+/-]{16,}=*)"),
    (
        b"andb",
        rb"[Ww]andb[ _-]?(?:login|api|key)[^\n]{0,64}?(?<![0-9a-f])([0-9a-f]{40})(?![0-9a-f])",
    ),
)


def _shapes(data: bytes) -> Iterator[_Span]:
    """Tokens that are known by how they begin; not in the middle of a longer word."""
    for begin, whole in _SHAPES:
        if begin in data:
            alone = rb"(?<![A-Za-z0-9_-]" + re.escape(begin) + rb")"
            pattern = re.escape(begin) + alone + whole[len(begin) :]
            yield from (match.span() for match in _bytes_pattern(pattern).finditer(data))
    for word, whole in _AFTER_WORDS:
        if word in data:
            yield from (match.span(1) for match in _bytes_pattern(whole).finditer(data))


def _private_keys(data: bytes) -> Iterator[_Span]:
    """What stands between the BEGIN and END lines of a private key, or after BEGIN where cut."""
    if b"PRIVATE KEY-----" not in data:
        return
    done = 0
    for match in _bytes_pattern(rb"-----BEGIN[ ][A-Z ]{0,32}PRIVATE[ ]KEY-----").finditer(data):
        if match.start() >= done:
            end = data.find(b"-----END", match.end())
            done = len(data) if end < 0 else end
            yield from _kept((match.end(), done), data)


_AFTER_NAME = rb"""  # the rest of a name and what stands before its value
    [a-z0-9_.-]{0,40} (?![a-z0-9_.-]) (?:\\{0,3}["'])? \]? [ \t]{0,4} (?:=>?(?!=)|:(?!:)) [ \t]{0,4}
"""
_NO_NUMBER = (
    rb"""(?! [ \t]{0,4} [0-9][0-9.,_]{0,11} (?:[\s;)\]}]|\Z))"""  # tokens=4096 in every line
)
_TELLING: tuple[tuple[bytes, bytes], ...] = (  # a pattern each: sre is fast where a literal leads
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


def _named(data: bytes, lower: bytes) -> Iterator[_Span]:
    """`NAME_TOKEN=value`, `"api_key": "value"`, `?token=value`, `Authorization: Bearer value`."""
    for word, after in _TELLING:
        if word in lower:
            yield from _named_by(_bytes_pattern(word + after), data, lower)


def _named_by(pattern: re.Pattern[bytes], data: bytes, lower: bytes) -> Iterator[_Span]:
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
    """Return where the name begins that has its telling part here; 48 bytes back at most."""
    low = max(0, at - 48)
    head = data[low:at]
    return low + len(
        head.rstrip(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
    )


def _word(data: bytes, begin: int, end: int) -> str:
    return data[begin:end].split(b"=")[0].split(b":")[0].strip(b" \t\\\"']").decode("latin-1")


def _is_loose(name: str) -> bool:
    return name != name.upper()


def _value_at(data: bytes, at: int, name: str, in_query: bool) -> _Span:
    """Return the span of the secret that stands here; an empty one where none does."""
    if in_query:
        match = _bytes_pattern(rb"""[^\s&\#"'<>\\]*""").match(data, at)
        return match.span() if match else (at, at)
    scheme = _bytes_pattern(_SCHEME).match(data, at)
    if scheme:
        rest = _bytes_pattern(rb"""[^\r\n"'\\]+""").match(data, scheme.end())
        return rest.span() if rest else (at, at)
    match = _bytes_pattern(_VALUE).match(data, at)
    if not match:
        return at, at
    begin, end = match.span(match.lastindex or 0)
    if match.lastindex == 4:  # bare: what closes a call, a list or a sentence is not the value's
        end = begin + len(data[begin:end].rstrip(b",;)]}>."))
    value = data[begin : min(end, begin + 256)].decode("latin-1")
    weak = name.lower() in ("token", "tokens", "authorization") and data[at - 1 : at] != b"="
    if is_plain(value, name) or (weak and _is_loose(name) and not _looks_random(value)):
        return end, end
    return begin, end


def _looks_random(value: str) -> bool:
    """Say whether a value is no word of a sentence: long, unbroken, with a digit."""
    return compiled(r"(?=.*[0-9])[^\s<>(){}\[\]]{8,}|[^\s<>(){}\[\]]{24,}").match(value) is not None


def _options(data: bytes, lower: bytes) -> Iterator[_Span]:
    """`--hf-token value` and `'--hf-token', 'value'`; `--token=value` is a name like others."""
    if b"--" not in data:
        return
    option = rb"""-- ([a-z][a-z0-9_.-]{0,63}) (?![a-z0-9_.-])
                  (?: [ \t]+ | \\{0,3}["'] [ ]? , \s{0,4} ) (?! \\{0,3}["']? --)"""
    for match in _bytes_pattern(option).finditer(lower):
        name = _word(data, match.start(1), match.end(1))
        if tells(name, False):
            value = _bytes_pattern(_VALUE).match(data, match.end())
            if value and not is_plain(value[value.lastindex or 0][:256].decode("latin-1"), name):
                yield from _kept(value.span(value.lastindex or 0), data)
