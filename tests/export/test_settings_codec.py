"""A profile as shell words and back: the same settings, whatever the machine."""

import pytest
from repo import ROOT
from shell_text import rendered_script, settings_in_bash

from saferun.export import settings_codec
from saferun.export.settings_codec import ScriptSettings
from saferun.profile import files as profiles
from saferun.profile.merge import Conditions, resolve

PROFILES = sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml"))
SOMEWHERE = [
    Conditions(torch, gpus, distributed, named)
    for torch in (None, "2.4.1", "2.8.0", "2.13.0+cpu")
    for gpus in (0, 1, 8)
    for distributed in (False, True)
    for named in (False, True)
]


@pytest.mark.parametrize("profile", PROFILES)
def test_a_shipped_profile_means_the_same_in_a_script_wherever_it_runs(profile, tmp_path):
    environ = {"HOME": str(tmp_path)}
    chain = profiles.chain(profiles.find(profile, environ, str(tmp_path)), environ)
    fragments = next((doc.match for doc in reversed(chain) if doc.match), ())
    script_settings = ScriptSettings(chain[-1].name, "--profile", fragments, chain)
    read = settings_codec.read(settings_in_bash(rendered_script(script_settings)), "run.sh")
    assert (read.profile, read.named, read.made_for) == (profile, True, fragments)
    for at in SOMEWHERE:
        ours = resolve(chain, (), at, origin="o")
        theirs = resolve(read.chain, (), at, origin="o")
        assert values(theirs) == values(ours), at


def values(profile) -> tuple:
    env = {name: setting.value for name, setting in profile.env.items()}
    argv = {name: setting.value for name, setting in profile.torchrun.items()}
    return profile.name, env, argv, profile.settings


def test_of_one_key_given_twice_each_counts_where_its_condition_holds():
    argv = ["p", "torch<2.5", "env.X", "old", "p", "torch>=2.5", "env.X", "new"]
    script_settings = settings_codec.read(argv, "run.sh")
    for torch, value in (("2.4.0", "old"), ("2.13.0", "new")):
        at = Conditions(torch, 0, False, True)
        assert resolve(script_settings.chain, (), at, origin="o").env["X"].value == value
