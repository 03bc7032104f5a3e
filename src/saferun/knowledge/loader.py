"""The data files of this folder; parsed once for each content, then read from a cache.

What is returned here is raw, and each file has one reader, which makes typed values of it:
diagnosis/signatures.py, planning/mitigation_catalog.py, gpu/cuda_errors.py,
doctor/checks/checks_driver.py, doctor/checks/checks_gpu.py, doctor/xid.py and audit/effects.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from saferun.system import paths

HERE = os.path.dirname(os.path.abspath(__file__))
_OF_A_RUN = ("failures.yaml", "mitigations.yaml", "cuda_errors.yaml")
_held: dict[str, tuple[str, bool]] = {}  # by file name, what `_read` returned
_kept: dict[str, dict[str, Any]] = {}  # by file name


def hold() -> None:
    """Have the texts of the documents that a run needs in memory from now on.

    Raises:
        OSError: one of them cannot be read.
    """
    _held.update({name: _read(name) for name in _OF_A_RUN})


def keep(environ: Mapping[str, str]) -> None:
    """Keep the parsed documents that a run needs in memory; `environ` is as for `load_failures`."""
    for name in _OF_A_RUN:
        _kept[name] = _document(name, environ)


def load_failures(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the document of failures.yaml: the signatures of failures and their meaning.

    Args:
        environ: gives the user's cache directory; by default that of this process.
    """
    return _document("failures.yaml", environ)


def load_mitigations(environ: Mapping[str, str] | None = None) -> Mapping[str, Any]:
    """Return what each mitigation changes and costs, by name, from mitigations.yaml."""
    document = _document("mitigations.yaml", environ)
    mitigations: Mapping[str, Any] = document["mitigations"]
    return mitigations


def load_xids(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the document of xid.yaml: what the driver's Xid events mean."""
    return _document("xid.yaml", environ)


def load_cuda_errors(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the document of cuda_errors.yaml: what the CUDA driver's errors mean."""
    return _document("cuda_errors.yaml", os.environ if environ is None else environ)


def load_driver_messages(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the document of driver_messages.yaml: what a failing NVML means."""
    return _document("driver_messages.yaml", os.environ if environ is None else environ)


def load_gpu_fields(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the document of gpu_fields.yaml: what fields of NVML's answer mean."""
    return _document("gpu_fields.yaml", os.environ if environ is None else environ)


def load_variable_effects(environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the document of variable_effects.yaml: what environment settings do."""
    return _document("variable_effects.yaml", environ)


def load_words(environ: Mapping[str, str] | None = None) -> Mapping[str, Mapping[str, str]]:
    """Return the document of words.yaml: the glossary, exit statuses, saferun's own variables."""
    return _document("words.yaml", environ)


def variables_text() -> str:
    """Return the text of variables.yaml, for audit/variable_index.py; "" if there is none."""
    try:
        with open(os.path.join(HERE, "variables.yaml"), encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:  # a bundle does not include it
        return ""


def load_for_bundle(environ: Mapping[str, str]) -> Mapping[str, Any]:
    """Return the documents that a run needs, by name, for a machine without a YAML parser."""
    return {name.removesuffix(".yaml"): _document(name, environ) for name in _OF_A_RUN}


def _document(name: str, environ: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the content of a YAML file of this folder, from the cache if its text is unchanged.

    A YAML parser needs 0.3 s for these files, json 2 ms. A bundle has only JSON.
    """
    if name in _kept:
        return _kept[name]

    text, is_bundled = _held.get(name) or _read(name)
    if is_bundled:
        known: dict[str, Any] = json.loads(text)
        return known
    cache = paths.cache_dir(os.environ if environ is None else environ)
    entry = os.path.join(cache, "knowledge", f"{name}.json")
    cached = _cached(entry, text)
    if cached is not None:
        return cached
    import yaml  # only where the cache has nothing; a generated script does without

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times faster, if PyYAML has it
    document: dict[str, Any] = yaml.load(text, Loader=loader)  # noqa: S506 (both loaders are safe)
    paths.write_private(entry, json.dumps({"text": text, "document": document}).encode())
    return document


def _read(name: str) -> tuple[str, bool]:
    """Return the text of a document, and whether it is a bundle's, in JSON."""
    bundled = os.path.join(HERE, name.removesuffix(".yaml") + ".json")
    is_bundled = os.path.exists(bundled)
    with open(bundled if is_bundled else os.path.join(HERE, name), encoding="utf-8") as file:
        return file.read(), is_bundled


def _cached(entry: str, text: str) -> dict[str, Any] | None:
    content = paths.read_private(entry)
    if content is None:
        return None
    try:
        kept = json.loads(content)
        document = kept["document"] if kept["text"] == text else None
    except (ValueError, TypeError, KeyError):
        return None
    return document if isinstance(document, dict) else None
