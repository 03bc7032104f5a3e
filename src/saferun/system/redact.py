"""Pure: find and mask secrets in settings, command lines, text and bytes, so none reach the disk.

A secret is the value of a variable or option with a secret's *name* (secret_names.py), wherever the
value occurs, or text that looks like a secret (secret_spans.py); `***` replaces it. A log must stay
readable: `max_tokens=512`, `KeyError: 'lm_head.weight'` and `pad_token: '<pad>'` are not secrets.
So in text a name is read word by word, and a value that cannot be a secret stays.

The search works on bytes: lowering and searching them is several times faster than with `str`, and
bytes that are not UTF-8 stay unchanged. Each rule yields spans; overlapping spans become one.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterator, Mapping, Sequence

from saferun.system import secret_spans
from saferun.system.secret_names import SHORTEST, is_path, is_plain, is_secret, tells
from saferun.system.secret_spans import STAR, Span

MASK = STAR.decode()
SHORTEST_CUT = 4  # bytes; a shorter end of a secret at the beginning of a tail is not masked
_PASSES = 16  # masked text is masked again until nothing changes; see `Masker._settle`


class Masker:
    """Masks the secrets of one run: those in its environment and command line, and lookalikes.

    Args:
        environ: the exported environment; values with secret names are masked everywhere.
        argv: the command line; the values of secret options are masked everywhere.
    """

    __slots__ = ("_in_data", "_in_text")

    def __init__(self, environ: Mapping[str, str], argv: Sequence[str]) -> None:
        found = [(name, value) for name, value in environ.items() if tells(name, False)]
        found += [(name, secret) for name, _, secret in _parts(argv) if secret]
        for text in (*environ.values(), *argv):
            found += [("password", value) for value in _url_passwords(text)]
        values = {value for name, given in found for value in _values(name, given)}
        forms = {form for value in values for form in _forms(value)}
        self._in_data = _encoded(forms, "surrogateescape")
        self._in_text = _encoded(forms, "surrogatepass")

    def text(self, text: str) -> str:
        """Return text without secrets; text without any is returned unchanged."""
        raw = text.encode("utf-8", "surrogatepass")
        masked = self._settle(raw, self._in_text)
        return text if masked == raw else masked.decode("utf-8", "surrogatepass")

    def data(self, data: bytes) -> bytes:
        """Return bytes (the tail of a stream) without secrets, whatever their encoding.

        A secret that is cut by the beginning of the tail is masked, too.
        """
        return self._settle(_uncut(data, self._in_data), self._in_data)

    def setting(self, name: str, value: str) -> str:
        """Return a variable's value, masked completely if the variable has a secret's name."""
        return MASK if value and is_secret(name) else self.text(value)

    def argv(self, argv: Sequence[str]) -> list[str]:
        """Return a command line without secrets, with the same number of arguments."""
        return [
            f"{plain}{MASK}" if secret else self.text(plain) for _, plain, secret in _parts(argv)
        ]

    def _settle(self, data: bytes, forms: Sequence[bytes]) -> bytes:
        """Mask until nothing changes, so that masking twice equals masking once.

        The second pass usually finds nothing: a mask and its surroundings can form a secret only if
        a secret itself contains stars. If that does not end, the whole text is masked.
        """
        for _ in range(_PASSES):
            spans = [*_occurrences(data, forms), *secret_spans.find(data)]
            masked = _replaced(data, spans)
            if masked == data:
                return data
            data = masked
        return STAR


# The secrets of a run


def _is_option(word: str) -> bool:
    """Return whether a word is an option; a random token may begin with a dash, too."""
    return re.compile(r"--?[A-Za-z][\w.-]*(=.*)?").fullmatch(word) is not None and (
        word.startswith("--") or len(word) < SHORTEST
    )


def _names_secret(name: str) -> bool:
    """Return whether `name=value` in a command line sets a secret (an option, variable or key)."""
    return re.compile(r"[-+]*(?:[\w.][\w.-]*)?").fullmatch(name) is not None and tells(name, False)


def _awaits_secret(option: str) -> bool:
    """Return whether the argument after this one is a secret: `--hf-token`, `-token`."""
    return option.startswith("-") and "=" not in option and _names_secret(option)


def _parts(argv: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Yield each word of a command line as (name, shown part, secret after it)."""
    for before, word in zip(["", *argv], argv, strict=False):
        name, equals, value = word.partition("=")
        if not _is_option(word) and _awaits_secret(before):
            yield before, "", word
        elif equals and _names_secret(name):
            yield name, f"{name}=", value
        else:
            yield "", word, ""


def _url_passwords(text: str) -> list[str]:
    if "://" not in text or "@" not in text:
        return []
    return re.compile(r"://[^\s/?#@:'\"<>]{0,256}:([^\s/'\"<>]+)@").findall(text)


def _values(name: str, given: str) -> Iterator[str]:
    """Yield the parts of a secret to search for: the whole, and long lines (PEM, JSON)."""
    value = given.strip()
    if len(value) < SHORTEST or is_plain(value, name) or is_path(value, name):
        return
    yield value
    lines = value.splitlines()
    if len(lines) > 1:
        yield from (line.strip() for line in lines if len(line.strip()) >= 2 * SHORTEST)


def _forms(value: str) -> set[str]:
    """Return a value in all its forms: plain, in URLs, JSON, Python, HTML, the shell and base64."""
    raw = value.encode("utf-8", "surrogateescape" if _is_escaped(value) else "surrogatepass")
    forms = {value, *_in_base64(raw)}
    if re.compile(r"[\w.~-]*").fullmatch(value) and value.isascii():
        return forms
    import html  # with urllib.parse 5 ms; only a secret with punctuation needs them
    import urllib.parse

    for kept in ("", "/", "/:@!$&'()*,;=+"):
        quoted = urllib.parse.quote(raw, safe=kept)
        forms |= {quoted, re.compile("%..").sub(lambda m: m[0].lower(), quoted)}
        forms.add(quoted.replace("%20", "+"))

    for ascii_only in (True, False):
        once = json.dumps(value, ensure_ascii=ascii_only)[1:-1]
        forms |= {once, json.dumps(once, ensure_ascii=ascii_only)[1:-1]}  # a record in a record
    forms |= {repr(value)[1:-1], repr(raw)[2:-1], value.replace("/", "\\/")}
    forms |= {value.replace("'", "'\"'\"'"), value.replace("'", "'\\''")}
    named = html.escape(value, quote=False)
    quoted = named.replace('"', "&quot;")
    return forms | {named, quoted, html.escape(value), quoted.replace("'", "&#39;")}


def _in_base64(raw: bytes) -> set[str]:
    """Return a value's forms in base64: alone, and with following text."""
    followed = raw[: len(raw) // 3 * 3]
    encoders = (base64.b64encode, base64.urlsafe_b64encode)
    return {encode(part).decode().rstrip("=") for encode in encoders for part in (raw, followed)}


def _is_escaped(value: str) -> bool:
    """Return whether all lone surrogates stand for bytes, as in `os.environ`."""
    return not re.compile("[\ud800-\udc7f\udd00-\udfff]").search(value)


def _encoded(forms: set[str], errors: str) -> tuple[bytes, ...]:
    """Return the forms that can be encoded, as bytes, the longest first."""
    found = set()
    for form in forms:
        try:
            found.add(form.encode("utf-8", errors))
        except UnicodeEncodeError:  # no bytes from the kernel decode to this
            continue
    return tuple(sorted(found, key=lambda form: (-len(form), form)))


def _uncut(data: bytes, forms: Sequence[bytes]) -> bytes:
    """Mask the end of a secret that the beginning of the data has cut."""
    for form in forms:
        for start in range(1, len(form) - SHORTEST_CUT + 1):
            if data.startswith(form[start:]):
                return STAR + data[len(form) - start :]
    return data


# Spans: (begin, end) of what is masked


def _replaced(data: bytes, spans: list[Span]) -> bytes:
    """Replace each span by a mask; spans that touch or overlap share one."""
    if not spans:
        return data
    spans.sort()
    pieces, done = [], 0
    begin, end = spans[0]
    for next_begin, next_end in [*spans[1:], (len(data) + 1, 0)]:
        if next_begin <= end:
            end = max(end, next_end)
            continue
        pieces += [data[done:begin], STAR]
        done, begin, end = end, next_begin, next_end
    return b"".join([*pieces, data[done:]])


def _occurrences(data: bytes, forms: Sequence[bytes]) -> Iterator[Span]:
    for form in forms:
        at = data.find(form)
        while at >= 0:
            yield at, at + len(form)
            at = data.find(form, at + len(form))
