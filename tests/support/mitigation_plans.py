"""The plan of an attempt with mitigations, and what a mitigation meets."""

import sys
from pathlib import Path

from repo import read_yaml

from saferun.knowledge import loader
from saferun.model import Identity, LaunchPlan, MachineFacts, Request
from saferun.planning import mitigation_catalog, mitigation_overlay
from saferun.planning.build import build_plan, conditions
from saferun.planning.torchrun import torchrun_args
from saferun.profile.merge import Given, resolve
from saferun.profile.schema import Doc, Leaf

SHIPPED = Path(loader.__file__).with_name("mitigations.yaml")
DATA = read_yaml(SHIPPED.read_text(encoding="utf-8"))["mitigations"]
ALL = mitigation_catalog.parse(DATA)
SITE = str(Path(loader.__file__).parents[1] / "inject" / "site")
ANSWERS = {
    "free": "40123",
    "fresh": "saferun-id",
    "open-files": "1048576",
    "processes": "1048576",
    "fresh-directory": "/tmp/fresh",
    "newest-ptxas": "/usr/local/cuda/bin/ptxas",
    "reachable-interface": "eth7",
}
QUIET = {
    "hooks.init.barrier": Leaf("off"),
    "hooks.init.set_device": Leaf(False),
    "hooks.init.agree": Leaf("off"),
    "hooks.order.mode": Leaf("off"),
    "hooks.order.wrap_barrier": Leaf(False),
    "hooks.excepthook": Leaf("off"),
    "hooks.shards": Leaf("off"),
}


def planned(
    *names: str,
    arguments: tuple[str, ...] = ("t.py", "--lr", "1"),
    environ: dict[str, str] | None = None,
    leaves: dict[str, Leaf] | None = None,
    sets: tuple[Given, ...] = (),
    answers: dict[str, str] | None = None,
) -> LaunchPlan:
    """The plan of an attempt with these mitigations, as the loop makes it."""
    environ = environ or {}
    program = str(Path(sys.executable).with_name("torchrun"))
    facts = MachineFacts(torch="2.13.0", launcher=(program,), python=sys.executable)
    line = torchrun_args.parse(arguments).line
    request = Request(line=line, options=torchrun_args.launch_options(line, environ))
    doc = Doc("p.yaml", "p", "", (), (), leaves or {})
    at = conditions(request, facts, named=True, starts_all=False)
    profile = resolve([doc], sets, at, origin="--profile")
    identity = Identity(SITE, "run", 2, None)
    base = build_plan(request, profile, facts, environ, identity)
    answers = ANSWERS if answers is None else answers
    here = mitigation_overlay.Situation(base, environ, "2.13.0", answers=answers)
    changed = mitigation_overlay.changes(ALL, names, here)
    return build_plan(request, profile, facts, environ, identity, changed)


def here(
    *arguments: str, environ: dict[str, str] | None = None, **what
) -> mitigation_overlay.Situation:
    """What a mitigation meets."""
    leaves = what.pop("leaves", None)
    base = planned(arguments=arguments or ("t.py",), environ=environ, leaves=leaves)
    facts = {"answers": ANSWERS, "torch": "2.13.0", **what}
    return mitigation_overlay.Situation(base, environ or {}, facts.pop("torch"), **facts)
