"""The knowledge of failures: complete, explained, consistent with the mitigations, parsed once."""

import re
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from job_logs import KNOWN

from saferun.diagnosis import signatures
from saferun.errors import SaferunError
from saferun.knowledge import loader
from saferun.profile import schema


@pytest.fixture(scope="module")
def mitigations() -> Mapping[str, Any]:
    return loader.load("mitigations.yaml")["mitigations"]


def test_kinds_and_mitigations_name_their_sources_and_what_exists(mitigations):
    for kind in KNOWN.kinds.values():
        assert kind.references, kind.name
        assert all(link.startswith("https://") for link in kind.references), kind.name
        assert bool(kind.mitigations) == (kind.verdict == "mitigate"), kind.name
        assert set(kind.mitigations) <= set(mitigations), kind.name
    for name, mitigation in mitigations.items():
        assert mitigation["why"], name
        assert mitigation["cost"], name
        assert mitigation["source"].startswith("https://"), name
        assert set(mitigation.get("excludes", ())) <= {*mitigations, "cudagraphs"}, name


def test_a_mitigation_sets_only_hooks_that_a_profile_may_set(mitigations):
    dotted = {
        f"hooks.{hook}.{key}"
        for mitigation in mitigations.values()
        for hook, settings in mitigation.get("hooks", {}).items()
        for key in settings
    }
    assert dotted - set(schema.KEYS) == set()


NOTHING: dict[str, Any] = {"classes": {}, "phrases": {}, "numbers": {}}
KIND = {"group": "g", "verdict": "retry", "explanation": "It is.", "advice": "Do."}


@pytest.mark.parametrize(
    ("kind", "sign", "wrong"),
    [
        ({}, {"kind": "no-such"}, "unknown kind `no-such`"),
        ({}, {"kind": "a", "sayz": ["x"]}, "unknown key `sayz`"),
        ({}, {"kind": "a", "weight": "heavy"}, "unknown weight `heavy`"),
        ({}, {"says": ["x"]}, "missing key `kind`"),
        ({"verdict": "again"}, {"kind": "a"}, "unknown verdict `again`"),
        ({"advise": "Do."}, {"kind": "a"}, "unknown key `advise`"),
    ],
)
def test_what_the_document_may_not_hold_is_refused(kind, sign, wrong):
    document = {"kinds": {"a": KIND | kind}, "signs": [sign], **NOTHING}
    with pytest.raises(SaferunError, match=re.escape(wrong)):
        signatures.parse(document)


def test_phrases_in_groups_by_who_prints_them_all_count():
    says = {"torch 2.4..2.9": ["Rank ... lost"], "elsewhere": ["gone"]}
    sign = {"kind": "a", "says": says}
    document = {"kinds": {"a": KIND}, "signs": [sign], **NOTHING}
    assert signatures.parse(document).signs[0].says == (("rank", "lost"), ("gone",))


def test_the_knowledge_is_parsed_once_per_content_and_not_again_where_it_is_kept(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(signatures, "_kept", [])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = signatures.load()
    monkeypatch.setitem(sys.modules, "yaml", None)  # an import would fail
    assert signatures.load() == first
    signatures.keep()
    monkeypatch.setattr(signatures, "parse", None)  # a call would fail
    assert signatures.load() == KNOWN


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"text": "old", "document": {}}'])
def test_a_useless_cache_entry_is_not_used(tmp_path, monkeypatch, content):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    signatures.load()
    (entry,) = tmp_path.rglob("failures.yaml.json")
    entry.write_bytes(content)
    assert signatures.load() == KNOWN
