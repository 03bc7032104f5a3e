"""What a real bash makes of text that saferun writes."""

import subprocess

from repo import ROOT

from saferun.export import shell_script
from saferun.export.settings_codec import ScriptSettings

DUMP = 'printf "%s\\0" "${got[@]}"\n'


def bash(text: str) -> list[str]:
    """Return the arguments that a bash program prints, each ended by a NUL."""
    done = subprocess.run(
        ["bash", "-u"],
        input=text.encode("utf-8", "surrogateescape"),
        capture_output=True,
        check=True,
    )
    assert done.stderr == b""
    return [word.decode("utf-8", "surrogateescape") for word in done.stdout.split(b"\0")[:-1]]


def rendered_script(
    script_settings: ScriptSettings, args=(), command=("saferun", "gen-shell"), kit=("cHJv", "a2l0")
) -> str:
    template = (ROOT / "shell" / "run.sh").read_text(encoding="utf-8")
    return shell_script.render(
        script_settings, args, command=command, template=template, kit=kit, whole=bool(args)
    )


def settings_in_bash(text: str) -> list[str]:
    """Return the settings of a script as the array that a real bash makes of them."""
    start, end = text.index("saferun_from="), text.index("# --- The job")
    return bash("set -euo pipefail\n" + text[start:end] + DUMP.replace("got", "saferun_settings"))
