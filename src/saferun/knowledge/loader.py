"""The data files of this folder. Each content is parsed once, then read from a cache.

The functions here return raw documents. One module per file makes typed values of them:
diagnosis/signatures.py, planning/mitigation_catalog.py, gpu/cuda_errors.py,
doctor/checks/checks_driver.py, doctor/checks/checks_gpu.py, doctor/xid.py and audit/effects.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from saferun.base import untrusted
from saferun.system import content_cache

HERE = os.path.dirname(os.path.abspath(__file__))
_OF_A_RUN = ("failures.yaml", "outside_faults.yaml", "mitigations.yaml", "cuda_errors.yaml")
_held: dict[str, tuple[str, bool]] = {}  # results of `_read` by file name
_kept: dict[str, dict[str, Any]] = {}  # parsed documents by file name


def hold() -> None:
    """Read the texts of the documents that a run needs into memory.

    Raises:
        OSError: one of them cannot be read.
    """
    _held.update({name: _read(name) for name in _OF_A_RUN})


def keep() -> None:
    """Keep the parsed documents that a run needs in memory."""
    _kept.update({name: load(name) for name in _OF_A_RUN})


def load(name: str) -> dict[str, Any]:
    """Return the content of a YAML file of this folder, from the cache if its text is unchanged.

    A YAML parser needs 0.3 s for these files, json 2 ms. A bundle has only JSON.
    """
    if name in _kept:
        return _kept[name]

    text, is_bundled = _held.get(name) or _read(name)
    if is_bundled:
        known: dict[str, Any] = json.loads(text)
        return known
    entry = f"knowledge/{name}"
    if cached := untrusted.mapping(content_cache.read(entry, text, os.environ)):
        return cached
    import yaml  # only if the cache lacks the text; a generated script never gets here

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, if PyYAML has it
    document: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506 (both loaders are safe)
    content_cache.write(entry, text, document, os.environ)
    return document


def variables_text() -> str:
    """Return the text of variables.yaml, for audit/variable_index.py; "" if there is none."""
    try:
        with open(os.path.join(HERE, "variables.yaml"), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:  # a bundle does not include it
        return ""


def load_for_bundle() -> Mapping[str, Any]:
    """Return the documents that a run needs, by name, for a machine without a YAML parser."""
    return {name.removesuffix(".yaml"): load(name) for name in _OF_A_RUN}


def _read(name: str) -> tuple[str, bool]:
    """Return the text of a document, and whether it is JSON from a bundle."""
    bundled = os.path.join(HERE, name.removesuffix(".yaml") + ".json")
    is_bundled = os.path.exists(bundled)
    with open(bundled if is_bundled else os.path.join(HERE, name), encoding="utf-8") as file:
        return file.read(), is_bundled
