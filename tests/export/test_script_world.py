"""The script of `gen-shell` in the world: locks, odd machines, odd shells, places for the kit."""

import os
import sys

import pytest
from cases import slow
from rights import OTHER, needs
from sandbox import SAFERUN, executable, python_program, shell_program, text_of, write
from scripts import RECORDING, end, up

WAITS = [
    {
        "code": "import signal, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(9)); "
        "open(f'{place}/up', 'w').close()\nwhile True: time.sleep(0.1)"
    }
]


@pytest.mark.parametrize(("policy", "first"), [("refuse", "script"), ("wait", "live")])
def test_a_script_and_a_live_run_see_each_other(machine, first, policy):
    machine.gpus(1)
    script = machine.script("--profile", "h100", "--", "train.py")
    commands = {"script": ["bash", script], "live": [*SAFERUN, "--profile", "h100", "train.py"]}
    holder = machine.start(commands[first], "first", ends=WAITS)
    up(machine, "first")
    second = "live" if first == "script" else "script"
    sets = f"locks.gpus={policy} locks.wait_s={60 if policy == 'wait' else 0}"
    other = machine.start(commands[second], "second", SAFERUN_SET=sets)
    line = other.stderr.readline()
    assert "is in use by pid" in line
    assert "(train.py, since " in line
    if policy == "wait":
        assert "waiting" in line
        holder.terminate()
    status, _ = end(other)
    assert status == (75 if policy == "refuse" else 0)
    assert list(machine.received("second")) == ([] if policy == "refuse" else [1])
    holder.terminate()
    assert end(holder)[0] == 9


def test_another_gpu_than_the_scripts_is_reported(machine):
    machine.gpus(1, "NVIDIA A100-SXM4-80GB")
    script = machine.script("--profile", "h100", "--", "train.py")
    ran = machine.run(["bash", script])
    assert ran.status == 0
    assert (
        "saferun: this script is made for H100 or GH200 (profile h100), and here is "
        "NVIDIA A100-SXM4-80GB" in ran.messages
    )


def test_disabled_it_is_plain_torchrun(machine):
    script = machine.script("--profile", "h100", "--", "train.py", "a b")
    own = dict.fromkeys(("line", "job", "torchrun", "POSIXLY_CORRECT"), "mine\nall the same")
    ran = machine.run(["bash", script, "more"], SAFERUN_DISABLE="1", **own)
    (received,) = ran.received.values()
    assert received.argv[1:] == ["train.py", "a b", "more"]
    assert "SAFERUN_INJECT" not in received.env
    assert {name: received.env.get(name) for name in own} == own
    assert ran.err == ""
    for name in ("torchrun", "python"):
        (machine.bin / name).unlink()
    machine.program("python3", '#!/bin/sh\necho "$@"\n')
    ran = machine.run(["bash", script], SAFERUN_DISABLE="1")
    assert ran.out == "-m torch.distributed.run train.py a b\n"


def test_the_job_begins_with_torchrun(machine):
    script = machine.script("--profile", "cpu", "--", "train.py")
    write(script, text_of(script).replace("\njob torchrun ", "\njob python "))
    ran = machine.run(["bash", script])
    assert (ran.status, ran.received) == (2, {})
    assert ran.err == "saferun: the job begins with the word torchrun, not with `python`\n"


def test_it_needs_no_programs_but_bash_and_python(machine):
    """No coreutils, no nvidia-smi, no yaml, no saferun."""
    tools = machine.folder / "tools"
    tools.mkdir()
    (tools / "bash").symlink_to("/usr/bin/bash")
    bare = shell_program(os.path.realpath(sys.executable), "-S")  # neither yaml nor saferun
    python = executable(tools / "python3", bare)
    machine.program("torchrun", python_program(RECORDING, "-IB", python=python))
    script = machine.script("--profile", "h100", "--", "train.py")
    ends = [{"code": "os.kill(os.getpid(), 9)"}, {}]
    ran = machine.run(["bash", script], ends=ends, PATH=f"{machine.bin}:{tools}")
    assert ran.status == 0, ran.err
    assert list(ran.received) == [1, 2]


@needs("become others")
def test_the_kit_does_not_go_to_a_home_of_somebody_else(machine):
    """A ~/.cache that root makes there would lock the user out of it."""
    script = machine.script("--profile", "cpu", "--", "train.py")
    home = machine.folder / "theirs"
    home.mkdir()
    os.chown(home, OTHER, OTHER)
    gone = str(machine.folder / "not here")
    ran = machine.run(["bash", script], TMPDIR=gone, XDG_RUNTIME_DIR=gone, HOME=str(home))
    assert ran.status == 0
    assert list(home.iterdir()) == []


WHERE = [{"code": "print(os.environ['PYTHONPATH'])"}]  # of the hooks, which lie in the kit


@pytest.mark.parametrize("usable", ["XDG_RUNTIME_DIR", "HOME", "nothing", *slow("TMPDIR")])
def test_the_kit_finds_a_place(machine, usable):
    script = machine.script("--profile", "cpu", "--", "train.py")
    gone = str(machine.folder / "not here")
    places = {"TMPDIR": gone, "XDG_RUNTIME_DIR": gone, "HOME": "/proc/self"}
    if usable != "nothing":
        places[usable] = str(machine.temporary)
    ran = machine.run(["bash", script], ends=WHERE, **places)
    assert ran.status == 0, ran.err
    assert ran.out.startswith("/tmp/saferun-kit" if usable == "nothing" else places[usable])
    assert machine.unpacked() == []


@needs("become others")
@pytest.mark.parametrize(
    ("owner", "mode", "above", "taken"),
    [
        (0, 0o1777, (0, 0o755), True),
        (0, 0o777, (0, 0o755), False),
        (OTHER, 0o755, (0, 0o755), False),
        (0, 0o755, (0, 0o757), False),
        *slow(
            (0, 0o755, (0, 0o755), True),
            (OTHER, 0o1777, (0, 0o755), False),
            (0, 0o755, (OTHER, 0o755), False),
            (0, 0o755, (0, 0o1777), True),
        ),
    ],
)
def test_the_kit_is_unpacked_only_where_nobody_else_can_replace_it(
    machine, owner, mode, above, taken
):
    """Code of others would run as root after `su` or `sudo -E`, which keep TMPDIR."""
    script = machine.script("--profile", "cpu", "--", "train.py")
    place = machine.folder / "above" / "[it]"
    place.mkdir(parents=True)
    for path, (uid, bits) in ((place, (owner, mode)), (place.parent, above)):
        os.chown(path, uid, uid)
        path.chmod(bits)
    ran = machine.run(["bash", script], ends=WHERE, TMPDIR=str(place), HOME="/proc/self")
    assert ran.status == 0, ran.err
    assert ran.out.startswith(f"{place}/" if taken else "/tmp/saferun-kit")


def test_a_bash_in_posix_mode_ends_as_the_job_did(machine):
    """As `sh run.sh` starts it where sh is bash."""
    (machine.bin / "sh").symlink_to("/bin/bash")
    script = machine.script("--profile", "cpu", "--", "train.py")
    ran = machine.run(["sh", script], ends=[{"status": 7}])
    assert (ran.status, list(ran.received)) == (7, [1]), ran.err


@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        ("dash '{}'", 69, "this script needs bash: bash "),
        ("bash -s < '{}'", 69, "save it, and run that"),
    ],
)
def test_where_it_cannot_run_it_says_so(machine, line, status, says):
    script = machine.script("--profile", "cpu", "--", "train.py")
    ran = machine.run(["bash", "-c", line.format(script)])
    assert (ran.status, ran.received, says in ran.err) == (status, {}, True)


@pytest.mark.parametrize("options", ["-eu", *slow("+u")])
def test_sourced_it_refuses_and_leaves_the_shell_as_it_was(machine, options):
    script = machine.script("--profile", "cpu", "--", "train.py")
    line = f"set {options}; before=$-; . '{script}' || echo status $?; "
    line += "[ $- = $before ] && echo same"
    ran = machine.run(["bash", "-c", line])
    assert ran.out == "status 2\nsame\n"
    assert ran.err.startswith("saferun: run this script, do not source it: bash ")
    assert ran.received == {}


def test_where_torchruns_python_is_too_old_the_one_on_path_unpacks(machine):
    """torch 2.8 has Python 3.9, and saferun's hooks run there."""
    asked = "case $* in *version_info*) exit 1 ;; esac"
    old = executable(
        machine.folder / "old" / "python3", shell_program(sys.executable, before=asked)
    )
    machine.program("torchrun", python_program(RECORDING, "-IB", python=old))
    (machine.bin / "python3").symlink_to(sys.executable)
    script = machine.script("--profile", "cpu", "--", "train.py")
    ran = machine.run(["bash", script])
    assert (ran.status, list(ran.received)) == (0, [1]), ran.err


def test_it_takes_streams_as_they_are_and_closed_ones_are_no_trouble(machine):
    """A pipe in, a pipe out, bytes unchanged."""
    code = "sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])"
    script = machine.script("--profile", "cpu", "--", "train.py")
    line = f"printf 'a\\377b\\n' | bash '{script}' 2>&- | od -An -c"
    ran = machine.run(["bash", "-c", line], ends=[{"code": code}])
    assert ran.out.split() == ["\\n", "b", "377", "a"]
    ran = machine.run(["bash", "-c", f"bash '{script}' <&- >&- 2>&-"], "closed")
    assert (ran.status, list(ran.received)) == (0, [1])


def test_a_dry_run_starts_nothing(machine):
    script = machine.script("--profile", "cpu", "--", "train.py")
    ran = machine.run(["bash", script], SAFERUN_DRY_RUN="1")
    assert (ran.status, ran.received) == (0, {})
    assert "command   " in ran.out
    assert "train.py" in ran.out


def test_a_script_starts_several_workers(machine):
    script = machine.script("--profile", "cpu", "--set", "launcher=python", "--", "train.py")
    code = "print(os.environ['SAFERUN_WORKER'])"
    machine.program("python", python_program(f"import os\n{code}\n"))
    with machine.start(["bash", script], SAFERUN_SET="workers=2") as job:
        out, err = job.communicate()
    assert (job.returncode, sorted(out.split())) == (0, ["0", "1"]), err
    assert machine.unpacked() == []


def test_a_gpu_that_cannot_be_tried_stops_the_job_where_the_profile_says_so(machine):
    machine.gpus(1)
    script = machine.script("--profile", "h100-llava", "--", "train.py")
    ran = machine.run(["bash", script])
    assert (ran.status, ran.received) == (69, {})
    assert ran.messages[-1] == "saferun: nothing is started (preflight.mode: require)"
