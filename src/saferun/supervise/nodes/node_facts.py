"""A node's contribution to the meetings, and the profile keys that all nodes share."""

from __future__ import annotations

import json
import os
import stat
import zlib
from typing import Any

from saferun import __version__
from saferun.inject.node import node_agreement
from saferun.model import Profile, Setting
from saferun.planning.inputs import RunInputs
from saferun.planning.torchrun.torchrun_args import value_of
from saferun.settings import HookSettings, leaves, with_values

CONTENT_BYTES = 1 << 20  # part of the script in its checksum: --no-python may start a large program
# Variables that concern one machine's network and devices; all others of a profile concern all
# ranks.
_OF_MACHINE = ("NCCL_", "GLOO_", "UCX_", "FI_", "OMPI_", "CUDA_", "OMP_", "TMPDIR", "PATH")


def of_run(gathered: RunInputs) -> node_agreement.NodeFacts:
    """Return the facts that do not change between attempts."""
    line, profile = gathered.request.line, gathered.profile
    assert profile is not None, "a supervised run has one"
    least, _, most = (value_of(line, gathered.environ, "nnodes") or "").partition(":")
    strict, resume = profile.settings.hooks.init.agree == "error", profile.settings.retry.resume
    return {
        "host": os.uname().nodename,
        "saferun": __version__,
        "torch": gathered.facts.torch or "" if strict else "",
        "nnodes": least if least == most or not most else f"{least}:{most}",
        "script": os.path.basename(line.script or ""),
        "content": _checksum(line.script),
        "resume": json.dumps(profile.settings.retry.resume) if resume.checkpoints else "none",
        "resume_args": " ".join(profile.settings.retry.resume_args) or "none",
    }


def keys(profile: Profile) -> dict[str, Any]:
    """Return the keys of a profile that change the ranks' behaviour: value by dotted name."""
    found: dict[str, Any] = {n: value for n, _, value in leaves(profile.settings.hooks, "hooks.")}
    for name, setting in profile.env.items():
        if not name.startswith(_OF_MACHINE):
            found[f"env.{name}"] = setting.value
    return found


def with_keys(profile: Profile, agreed: dict[str, Any], free: list[str]) -> Profile:
    """Return a profile with the keys that all nodes of a run share.

    Args:
        profile: this node's profile.
        agreed: the shared keys and their values.
        free: keys that each node sets for itself.
    """
    hooks = with_values(HookSettings(), agreed, "hooks.")
    env = {
        name: setting
        for name, setting in profile.env.items()
        if name.startswith(_OF_MACHINE) or f"env.{name}" in free or f"env.{name}" in agreed
    }
    for key, value in agreed.items():
        name = key.removeprefix("env.")
        if name != key and (name not in env or env[name].value != value):
            env[name] = Setting(value, "the other nodes", "all ranks of a run get the same")
    return profile._replace(settings=profile.settings._replace(hooks=hooks), env=env)


def _checksum(script: str | None) -> str:
    """Return a checksum of a script; "" for a module, a pipe, or an unreadable file."""
    try:
        if not stat.S_ISREG(os.stat(script or "").st_mode):
            return ""
        with open(script or "", "rb") as file:
            return f"{zlib.crc32(file.read(CONTENT_BYTES)):08x}"
    except (OSError, ValueError):
        return ""
