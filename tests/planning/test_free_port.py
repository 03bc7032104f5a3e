"""The option with which a taken port is left depends on the rendezvous, and torchrun takes it."""

import os

import pytest
from cases import check_cases
from helpers import taken_port
from mitigation_plans import ALL, QUIET, here, planned
from sandbox import captured

from saferun.planning import mitigation_overlay
from saferun.planning.torchrun import torchrun_args
from saferun.supervise.changes import probes

ETCD = ("--rdzv-backend=etcd-v2", "--rdzv-endpoint=etcd:2379")
RENDEZVOUS = {
    "default": ((), {}, "--master-port=40123"),
    "exported port": ((), {"PET_MASTER_PORT": "29500"}, "--master-port=40123"),
    "static endpoint": (("--rdzv-endpoint=h:1",), {}, "--rdzv-endpoint=h:40123"),
    "c10d on IPv6": (
        ("--rdzv-backend=c10d", "--rdzv-endpoint=[::1]:29500"),
        {},
        "--rdzv-endpoint=[::1]:40123",
    ),
    "c10d without an endpoint": (("--rdzv-backend=c10d",), {}, "--rdzv-endpoint=localhost:40123"),
    "exported c10d": ((), {"PET_RDZV_BACKEND": "c10d"}, "--rdzv-endpoint=localhost:40123"),
    "any port": (("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"), {}, None),
    "standalone": (("--standalone", "--master-port=29500"), {}, None),
    "etcd": (ETCD, {}, None),
    "file": (
        ("--rdzv-backend=c10d", "--rdzv-conf=store_type=file", "--rdzv-endpoint=/tmp/f"),
        {},
        None,
    ),
    "several nodes": (("--nnodes=2",), {}, None),
}


def test_the_option_that_moves_the_port_depends_on_the_rendezvous():
    def check(argv: tuple[str, ...], environ: dict[str, str], option: str | None) -> None:
        at = here(*argv, "t.py", environ=environ)
        refused = mitigation_overlay.refusal(ALL, "free-port", (), at)
        assert (refused == "") is (option is not None)
        if option is not None:
            assert mitigation_overlay.changes(ALL, ["free-port"], at).torchrun == (option,)

    check_cases(RENDEZVOUS, check)


@pytest.mark.parametrize(
    ("argv", "host"),
    [
        ((), ""),
        (("--master-addr=node1",), "node1"),
        (("--rdzv-endpoint=[::1]:29500", "--master-addr=node1"), "::1"),
        (("--rdzv-endpoint=node2",), "node2"),
    ],
)
def test_ranks_meet_at_the_endpoint_or_the_master(argv, host):
    assert mitigation_overlay.meeting_host(here(*argv, "t.py")) == host


SCRIPTS = [
    ("t.py",),
    ("--", "t.py", "--x"),
    ("t.py", "--", "t.py"),
    ("-m", "pkg.train", "--rdzv-id", "7"),
    ("--master-port=1", "--", "t.py", "--", "-x"),
    ("--master_p", "1", "-t3", "t.py"),
]


@pytest.mark.parametrize("arguments", SCRIPTS, ids=" ".join)
def test_torchruns_own_parser_takes_the_mitigations_option_and_the_same_script(arguments):
    run = pytest.importorskip("torch.distributed.run")
    line = torchrun_args.parse(arguments).line
    plan = planned("free-port", arguments=arguments)
    read = run.get_args_parser().parse_args(list(plan.torchrun_args))
    assert read.master_port == 40123
    assert (read.training_script, tuple(read.training_script_args)) == (
        line.script,
        line.script_args,
    )


LISTEN = """
import os, sys, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()  # or one may leave while the other still connects
print(f"met {dist.get_world_size()}")  # at once: torchrun gives ranks -u
dist.destroy_process_group()
"""
TAKEN = {
    "master port": (("--master-port={port}",), {}),
    "c10d": (("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:{port}"), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "environ"), TAKEN.values(), ids=TAKEN)
def test_a_job_whose_port_is_taken_meets_on_a_free_one(arguments, environ, tmp_path):
    pytest.importorskip("torch")
    script = tmp_path / "t.py"
    script.write_text(LISTEN, encoding="utf-8")
    with taken_port() as port:
        arguments = [word.format(port=port) for word in arguments]
        arguments = (*arguments, "--nproc-per-node=2", str(script))
        environ = {name: text.format(port=port) for name, text in environ.items()}
        asked = probes.Probes({}, None).ask(["free"], 2)
        ended = {}
        for names in ((), ("free-port",)):
            if not names and "c10d" in arguments:
                continue  # torchrun takes 60 s to see it
            plan = planned(
                *names, arguments=arguments, environ=environ, leaves=QUIET, answers=asked
            )
            env = plan.environment({**os.environ, **environ})
            done = captured(*plan.command, env=env, cwd=tmp_path)
            ended[names] = (done.returncode, done.stdout.count("met 2"), done.stderr)
    if () in ended:
        assert ended[()][0] != 0
        assert "EADDRINUSE" in ended[()][2]
    assert ended[("free-port",)][:2] == (0, 2), ended[("free-port",)]
