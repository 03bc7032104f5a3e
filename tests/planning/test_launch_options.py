"""What a launch asks of torchrun: from its command line, else from the environment."""

import pytest
from cases import check_cases

from saferun.planning.torchrun.torchrun_args import launch_options, parse, value_of


def line_of(*argv):
    return parse([*argv, "t.py"]).line


SETTINGS = {
    "given": (["--tee", "3"], {"PET_TEE": "1"}, "tee", "3"),
    "given empty": (["--tee="], {"PET_TEE": "1"}, "tee", ""),
    "exported": ([], {"PET_NPROC_PER_NODE": "gpu"}, "nproc_per_node", "gpu"),
    "exported empty": ([], {"PET_RDZV_ID": ""}, "rdzv_id", ""),
    "neither": ([], {"NNODES": "2"}, "nnodes", None),
    "no PET_ for it": ([], {"PET_NUMA_BINDING": "node"}, "numa_binding", None),
    "flag given": (["--standalone"], {"PET_STANDALONE": "0"}, "standalone", ""),
    "flag exported on": ([], {"PET_STANDALONE": "1"}, "standalone", ""),
    "flag exported off": ([], {"PET_STANDALONE": "0"}, "standalone", None),
    "flag exported unreadable": ([], {"PET_STANDALONE": "yes"}, "standalone", None),
    "an option of another torch": ([], {"PET_NEW_THING": "x"}, "new_thing", "x"),
}


def test_an_option_comes_from_the_line_else_from_the_environment():
    def check(argv, environ, dest, value):
        assert value_of(line_of(*argv), environ, dest) == value

    check_cases(SETTINGS, check)


@pytest.mark.parametrize(
    ("argv", "environ", "nodes"),
    [
        ([], {}, 1),
        (["--nnodes", "2"], {"PET_NNODES": "3"}, 2),
        (["--nnodes=1:4"], {}, 4),
        ([], {"PET_NNODES": "2:8"}, 8),
        (["--nnodes", "1:2:3"], {}, None),
        (["--nnodes", "x:2"], {}, None),
    ],
)
def test_max_nodes_is_the_upper_end(argv, environ, nodes):
    assert launch_options(line_of(*argv), environ).nodes == nodes


@pytest.mark.parametrize(
    ("argv", "environ", "restarts"),
    [
        ([], {}, 0),
        (["--max-restarts", "3"], {"PET_MAX_RESTARTS": "1"}, 3),
        ([], {"PET_MAX_RESTARTS": "1"}, 1),
        ([], {"PET_MAX_RESTARTS": "many"}, 0),
    ],
)
def test_max_restarts_counts_torchruns_own(argv, environ, restarts):
    assert launch_options(line_of(*argv), environ).restarts == restarts
