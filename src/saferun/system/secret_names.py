"""Pure: names that mean secrets, and values that cannot be secrets.

A name is read word by word, so that `pad_token` and `monkey` are not. redact.py and secret_spans.py
use this to find secrets in a run's output.
"""

from __future__ import annotations

import re
from functools import lru_cache

SHORTEST = 8  # characters; a shorter value would be masked inside ordinary words
_NAME_PATTERNS = (
    *("KEY", "TOKEN", "SECRET", "PASSWORD", "PASSWD", "PASSPHRASE", "CREDENTIAL"),
    *("WEBHOOK", "COOKIE", "AUTH_CONFIG", "CONNECTION_STRING", "NETRC", "PGPASS"),
    *("JWT", "BEARER"),
)
_NAME_ENDINGS = ("_PASS", "_PWD", "_AUTH", "_PAT", "_CREDS", "_DSN", "_SAS")
_HARMLESS = frozenset(("VAULT_ADDR", "VAULT_NAMESPACE", "VAULT_SKIP_VERIFY", "VAULT_CACERT"))
STRONG = ("secret", "passw", "passphrase", "credential")  # no harmless word contains one of these
_NO_TOKEN = ("tokeni", "tokenwise")  # tokenizer, tokenised, …
_NO_KEY = ("monkey", "turkey", "donkey", "hockey", "jockey", "whiskey", "hotkey")


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


_BEFORE_TOKEN = _set(  # as in pad_token, max_new_tokens: part of a vocabulary, or a number
    "pad eos bos unk sep cls mask image video audio special stop eot eom start end begin first last"
    " next prev max min num n new total per think input output decoder forced additional"
)
_BEFORE_KEY = _set(  # in lower-case text a key is mostly a dictionary's: sort_key, text_key
    "api access secret private auth ssh wandb hf openai anthropic azure aws storage account gcp"
    " encryption encrypt signing license master deploy service client app comet neptune session"
    " subscription host rsa ssl tls pem gpg jwt hmac"
)
_PLAIN_VALUES = _set(
    "none null nil true false yes no on off undefined disabled enabled required optional missing"
    " default unset nan str string bytes int bool"
)
_ROOTS = _set(  # beginnings of the path in SSH_KEY_FILE or GOOGLE_APPLICATION_CREDENTIALS
    "home root etc usr var opt mnt tmp data run srv dev proc scratch workspace workspaces content"
    " kaggle gpfs lustre nfs shared users volumes project projects work app secrets"
)


def is_secret(name: str) -> bool:
    """Return whether a variable with this name contains a secret, by the patterns above."""
    upper = name.upper()
    if upper in _HARMLESS:
        return False
    known = upper.endswith(_NAME_ENDINGS) or upper.startswith("VAULT_")
    return known or any(word in upper for word in _NAME_PATTERNS)


@lru_cache(maxsize=512)
def tells(name: str, loose: bool) -> bool:
    """Return whether a name, read word by word, means a secret.

    Args:
        name: the name as written; `apiKey` and `API_KEY` are equal.
        loose: the name is a lower-case word in free text, in which `key` alone proves nothing.
    """
    spread = re.compile(r"(?<=[a-z0-9])(?=[A-Z])").sub("_", name)
    parts = [part for part in re.compile(r"[^a-z]+").split(spread.lower()) if part]
    for before, part in zip(["", *parts], parts, strict=False):
        if any(word in part for word in STRONG) and not part.startswith("secretar"):
            return True
        if "token" in part and not any(word in part for word in _NO_TOKEN):
            last = part is parts[-1]
            if before not in _BEFORE_TOKEN and (last or not loose):
                return True
        if _is_key(before, part, loose):
            return True
    if not loose and is_secret(name) and not any(w in name.upper() for w in ("KEY", "TOKEN")):
        return True
    return parts[-1:] in (["pwd"], ["pass"]) and len(parts) > 1


def _is_key(before: str, part: str, loose: bool) -> bool:
    stem = part[:-1] if part.endswith("keys") else part
    if not stem.endswith("key") or stem.endswith(_NO_KEY):
        return False
    return not loose or (stem[:-3] or before) in _BEFORE_KEY


def is_plain(value: str, name: str) -> bool:
    """Return whether a value cannot be a secret: a number, a word such as `false`, a reference."""
    if value.lower() in _PLAIN_VALUES:
        return True
    lower = name.lower()
    if any(word in lower for word in STRONG):
        return False
    number = r"[-+]?[0-9][0-9_,.]{0,11}(?:[eE][-+]?[0-9]{1,3})?"
    reference = r"\$[A-Z_][A-Z0-9_]*|\$?\{[A-Za-z_][\w.]*\}|<[^<>]{1,32}>|\[[A-Z0-9_]{1,16}\]"
    return re.compile(f"{number}|{reference}").fullmatch(value) is not None


def is_path(value: str, name: str) -> bool:
    """Return whether a value is certainly a path; a random token may also begin with a slash."""
    if not value.startswith(("/", "./", "../", "~/")):
        return False
    if name.upper().endswith(("_FILE", "_FILES", "_PATH", "_DIR", "_HOME")):
        return True
    first, slash, _ = value.lstrip("/").partition("/")
    return bool(slash) and (first in _ROOTS or not value.startswith("/"))
