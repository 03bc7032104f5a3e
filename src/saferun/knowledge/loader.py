"""What is known about the world: data with sources. `load_*` read it, parsed once per content."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from saferun.system import paths

HERE = os.path.dirname(os.path.abspath(__file__))


def load_failures(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return how failures look and what they mean, as the document of failures.yaml.

    Args:
        environ: for the user's cache directory; the process's own where left out.
    """
    return _document("failures.yaml", os.environ if environ is None else environ)


def load_mitigations(environ: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """Return what each mitigation changes and costs, by name (mitigations.yaml)."""
    document = _document("mitigations.yaml", os.environ if environ is None else environ)
    mitigations: Mapping[str, Any] = document["mitigations"]
    return mitigations


def load_xids(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what the driver's Xid events mean, as the document of xid.yaml."""
    return _document("xid.yaml", os.environ if environ is None else environ)


def load_settings(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what environment settings do, as the document of settings.yaml."""
    return _document("settings.yaml", os.environ if environ is None else environ)


def variables_text() -> str:
    """Return variables.yaml as it stands (`saferun.readers` reads it); "" where it is not there."""
    try:
        with open(os.path.join(HERE, "variables.yaml"), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:  # a kit does not carry it
        return ""


def load_for_kit(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Return what a run may need, by name, for a machine that may have no YAML parser."""
    return {name: _document(f"{name}.yaml", environ) for name in ("failures", "mitigations")}


def _document(name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Read a YAML file of ours, as JSON from the cache where its text is unchanged.

    A YAML parser needs 0.3 s for these files, json 2 ms. In a kit there is only JSON.
    """
    import json

    travelled = os.path.join(HERE, name.removesuffix(".yaml") + ".json")
    if os.path.exists(travelled):
        with open(travelled, encoding="utf-8") as file:
            known: dict[str, Any] = json.load(file)
            return known
    with open(os.path.join(HERE, name), encoding="utf-8") as file:
        text = file.read()
    entry = os.path.join(paths.cache_dir(environ), "knowledge", f"{name}.json")
    cached = _cached(entry, text)
    if cached is not None:
        return cached
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, where it was built
    document: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506 (safe, either way)
    paths.write_private(entry, json.dumps({"text": text, "document": document}).encode())
    return document


def _cached(entry: str, text: str) -> dict[str, Any] | None:
    import json

    content = paths.read_private(entry)
    if content is None:
        return None
    try:
        kept = json.loads(content)
        document = kept["document"] if kept["text"] == text else None
    except (ValueError, TypeError, KeyError):
        return None
    return document if isinstance(document, dict) else None
