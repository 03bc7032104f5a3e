"""The knowledge of failures: complete, explained, consistent with the mitigations, parsed once."""

from __future__ import annotations

import re

import pytest
from job_logs import KNOWN

from saferun.diagnosis import signatures
from saferun.knowledge import loader
from saferun.profile import schema


@pytest.mark.parametrize("kind", KNOWN.kinds.values(), ids=KNOWN.kinds)
def test_every_kind_explains_itself_briefly_and_names_a_source(kind):
    for text in (kind.explanation, kind.advice):
        sentences = re.findall(r"[.!?](?:\s|$)", text)
        assert 1 <= len(sentences) <= 3
    assert all(reference.startswith("https://") for reference in kind.references)
    assert kind.references
    assert bool(kind.mitigations) == (kind.verdict == "mitigate")


def test_every_mitigation_that_a_kind_names_is_known():
    mitigations = loader.load_mitigations({"XDG_CACHE_HOME": "/proc/nowhere"})
    named = {name for kind in KNOWN.kinds.values() for name in kind.mitigations}
    assert named - set(mitigations) == set()


def test_a_mitigation_names_only_kinds_and_mitigations_that_exist():
    mitigations = loader.load_mitigations({"XDG_CACHE_HOME": "/proc/nowhere"})
    for mitigation in mitigations.values():
        assert set(mitigation.get("excludes", ())) <= {*mitigations, "cudagraphs"}
        assert mitigation["why"]
        assert mitigation["source"].startswith("https://")
        assert mitigation["cost"]


def test_a_mitigation_sets_only_hooks_that_a_profile_may_set():
    mitigations = loader.load_mitigations({"XDG_CACHE_HOME": "/proc/nowhere"})
    dotted = {
        f"hooks.{hook}.{key}"
        for mitigation in mitigations.values()
        for hook, settings in mitigation.get("hooks", {}).items()
        for key in settings
    }
    assert dotted - set(schema.KEYS) == set()


def _kind():
    kind = KNOWN.kinds["cuda-oom"]._asdict()
    return {key: value for key, value in kind.items() if key != "name"}


@pytest.mark.parametrize(
    "body",
    [{"kind": "no-such"}, {"kind": "cuda-oom", "sayz": ["x"]}],
    ids=["unknown kind", "unknown key"],
)
def test_a_wrong_sign_is_refused(body):
    document = {"kinds": {"cuda-oom": _kind()}, "signs": [body], "classes": {}, "phrases": {}}
    with pytest.raises(signatures.SaferunError):
        signatures.parse(document)


def test_the_knowledge_is_parsed_once_per_content(tmp_path, monkeypatch):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    first = signatures.load(environ)
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)  # an import would fail
    assert signatures.load(environ) == first


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"text": "old", "document": {}}'])
def test_a_useless_cache_entry_is_not_used(tmp_path, content):
    environ = {"XDG_CACHE_HOME": str(tmp_path)}
    signatures.load(environ)
    (entry,) = tmp_path.rglob("failures.yaml.json")
    entry.write_bytes(content)
    assert signatures.load(environ) == KNOWN
