"""The settings audit: what an environment's variables do, and which of them do nothing."""

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence

import pytest
from cases import check_cases
from releases import torch_before
from repo import ROOT
from requested import TORCH, requested
from sandbox import SAFERUN, captured, write

from saferun.audit import alloc_conf, collect, effects, judge, script_ast
from saferun.audit import report as audit
from saferun.errors import SaferunError
from saferun.knowledge import loader
from saferun.model import Gpu, GpuFacts, MachineFacts, Setting

SXM = tuple(Gpu(n, f"GPU-{n}", "NVIDIA H100 80GB HBM3") for n in range(2))
PCIE = tuple(Gpu(n, f"GPU-{n}", "NVIDIA GeForce RTX 4090") for n in range(2))


def found(
    environ: dict[str, str], torch: str = TORCH, gpus: Sequence[Gpu] = (), script: str = ""
) -> list[tuple[str, str]]:
    """Return level and text of each finding that is not ok."""
    facts = MachineFacts(gpu=GpuFacts(tuple(gpus)), torch=torch)
    findings = audit.findings(environ, facts, script_ast.read_script(script))
    return [(f.level, f"{f.what} | {f.detail} | {f.fix}") for f in findings if f.level != "ok"]


FINDINGS = (  # what is exported, the level of the finding, a part of its text
    ({"CUDA_LAUNCH_BLOCKING": "1"}, "problem", "37 to 40 %"),
    ({"TORCHINDUCTOR_MAX_AUTOTUNE": "true"}, "problem", "counts as off"),
    ({"TORCHDYNAMO_SUPPRESS_ERRORS": "0"}, "problem", "0 turns it on"),
    ({"NCCL_ASYNC_ERROR_HANDLING": "0"}, "problem", "under torchrun it does nothing"),
    ({"NCCL_BLOCKING_WAIT": "1"}, "note", "export TORCH_NCCL_BLOCKING_WAIT"),
    ({"CUDA_VISIBLE_DEVICES": ""}, "problem", "hides every GPU"),
    ({"OMP_NUM_THREADS": "auto"}, "problem", "not a number of threads"),
    ({"KMP_AFFINITY": "compact"}, "note", "Intel's and LLVM's OpenMP only"),
    ({"TORCH_USE_CUDA_DSA": "1"}, "problem", "switch of torch's build"),
    ({"NCCL_TIMEOUT": "1800"}, "note", "init_process_group"),
    ({"FI_EFA_USE_DEVICE_RDMA": "1"}, "note", "has no RDMA read"),
    ({"TRANSFORMERS_CACHE": "/c"}, "note", "export HF_HOME"),
    ({"NCCL_SOME_THING": "1"}, "note", "not known to us"),
    ({"TORCHINDUCTOR_USE_CUDAGRAPHS": "0"}, "note", "a similar name: TORCHINDUCTOR_CUDAGRAPHS"),
    ({"TORCHINDUCTOR_DISABLE": "1"}, "problem", "TORCH_COMPILE_DISABLE=1"),
    ({"TORCH_NCCL_BLOCKING_WAIT": "1"}, "note", "turns TORCH_NCCL_ASYNC_ERROR_HANDLING off"),
    ({"NCCL_DEBUG": "DEBUG"}, "problem", "knows no such level"),
    ({"NCCL_NET_GDR_LEVEL": "PBH"}, "problem", "one of LOC, PIX, PXB, PHB, SYS"),
    ({"NCCL_DISABLE_IB": "1"}, "note", "a similar name: NCCL_IB_DISABLE"),
    ({"CUDA_MAX_CONNECTIONS": "1"}, "problem", "export CUDA_DEVICE_MAX_CONNECTIONS=1"),
    ({"PYTORCH_TIMEOUT": "600"}, "problem", "has no reader"),
    ({"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}, "problem", "does nothing | since torch 2.8"),
    ({"TORCHELASTIC_ERORR_FILE": "/e"}, "problem", "if TORCHELASTIC_ERROR_FILE is meant"),
    ({"NCCL_DEBUG_SUBSYS": "WARN"}, "problem", "NCCL_DEBUG=WARN or INFO for the level"),
    ({"NCCL_IB_DISABLE": "true"}, "problem", "counts as 0, since NCCL reads a number"),
    ({"NCCL_BUFFSIZE": "4M"}, "problem", "counts as 4,"),
    ({"TORCH_DISTRIBUTED_DEBUG": "DETAILED"}, "problem", "OFF, INFO or DETAIL"),
    ({"TORCH_LOGS": "+dynamo,recompile"}, "problem", "did you mean recompiles?"),
    ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:true"}, "problem", "True or False"),
    ({"PYTORCH_ALLOC_CONF": "max_splt_size_mb:128"}, "problem", "max_split_size_mb?"),
    (
        {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:99", "PYTORCH_ALLOC_CONF": ""},
        "problem",
        "both set, and differ",
    ),
    (
        {"NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_BLOCKING_WAIT": "0"},
        "problem",
        "NCCL_BLOCKING_WAIT is overruled by TORCH_NCCL_BLOCKING_WAIT=0",
    ),
    (
        {"TORCHINDUCTOR_CUDAGRAPHS": "1", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        "note",
        "together with CUDA graphs",
    ),
)


def test_a_finding_says_what_is_wrong():
    def check(environ: dict[str, str], level: str, part: str) -> None:
        assert any(one[0] == level and part in one[1] for one in found(environ)), found(environ)

    check_cases(FINDINGS, check)


FINE: tuple[dict[str, str], ...] = (
    {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"},
    {"CUDA_LAUNCH_BLOCKING": "0"},
    {"NCCL_ASYNC_ERROR_HANDLING": "1"},
    {"OMP_NUM_THREADS": "8,2"},
    {"CUDA_HOME": "/usr/local/cuda", "NCCL_VERSION": "2.27.3"},
    {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "0x1", "NCCL_CROSS_NIC": "2"},
    {"TORCH_DISTRIBUTED_DEBUG": "detail", "TORCH_LOGS": "+dynamo,graph_breaks,my_package.module"},
    {"NCCL_DEBUG_SUBSYS": "^init,COLL", "NCCL_IB_TIMEOUT": "22", "NCCL_IB_HCA": "mlx5"},
    {"TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_RUN_ID": "none"},
    {"PYTORCH_ENABLE_MPS_FALLBACK": "1", "CUDA_VERSION": "12.4"},
    {"KMP_DUPLICATE_LIB_OK": "TRUE"},
    {"NCCL_DEBUG": "warn", "NCCL_P2P_LEVEL": "5", "NCCL_NET_GDR_LEVEL": "SYS"},
    {"OMP_STACKSIZE": "64M", "OMP_PROC_BIND": "close"},
    {"TF_GPU_ALLOCATOR": "cuda_malloc_async"},
    {"FI_PROVIDER": "efa", "NVIDIA_TF32_OVERRIDE": "0", "WANDB_MODE": "offline"},
)


def test_what_works_as_it_stands_is_fine():
    assert [(environ, found(environ)) for environ in FINE if found(environ)] == []


def test_a_fine_setting_says_who_reads_it_and_what_it_does():
    (one,) = audit.findings({"TORCHINDUCTOR_CUDAGRAPHS": "1"}, MachineFacts(torch=TORCH))
    assert one.level == "ok"
    assert "turns CUDA graphs on; it cannot turn them off" in one.detail
    assert "torch 2.4.0 to " in one.detail
    assert "_inductor/config.py" in one.detail


def test_some_settings_have_an_effect_under_some_releases_alone():
    environ = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert "export PYTORCH_CUDA_ALLOC_CONF" in str(found(environ, torch="2.9.1"))
    assert found(environ, torch="2.10.0") == []
    environ = {"TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
    assert found(environ, torch="2.7.1+cu126") == []
    assert found(environ, torch="2.8.0+cu128")[0][0] == "problem"


def test_p2p_off_matters_where_gpus_can_copy_to_each_other():
    plain = tuple(Gpu(n, f"GPU-{n}", "NVIDIA L40S") for n in range(2))
    assert "NVLink" in str(found({"NCCL_P2P_DISABLE": "1"}, gpus=SXM))
    assert "note" in str(found({"NCCL_P2P_DISABLE": "1"}, gpus=plain))
    assert found({"NCCL_P2P_DISABLE": "1"}, gpus=PCIE) == []
    assert found({"NCCL_P2P_DISABLE": "0"}, gpus=SXM) == []


def test_ib_off_matters_where_there_are_cards():
    for value, cards, level in (("1", ["mlx5_0"], "problem"), ("1", [], "ok"), ("0", ["m"], "ok")):
        environ = {"NCCL_IB_DISABLE": value}
        (one,) = audit.findings(environ, MachineFacts(torch=TORCH), adapters=cards)
        assert one.level == level


def test_what_torch_only_records_is_not_read_by_torch():
    (one,) = audit.findings({"NCCL_IB_TIMEOUT": "20"}, MachineFacts(torch=TORCH))
    assert ("read by nccl " in one.detail, "torch" in one.detail) == (True, False)


INFO, AUTOTUNE, GRAPHS = "NCCL_DEBUG", "TORCHINDUCTOR_MAX_AUTOTUNE", "TORCHINDUCTOR_CUDAGRAPHS"
CONFIG = "import torch._inductor.config as c\nc.triton.cudagraphs = False"
PARTIAL = '@partial(torch.compile, mode="reduce-overhead")\ndef f(): pass'
SCRIPTS = (  # what is exported, and a part of the finding; "" for none
    ('os.environ["NCCL_DEBUG"] = "WARN"', {INFO: "INFO"}, "itself, on line 1"),
    ('os.environ.update({"NCCL_DEBUG": v})', {INFO: "INFO"}, "itself, on line 1"),
    ('x\ntorch.compile(m, mode="max-autotune")', {AUTOTUNE: "0"}, '"max-autotune") on line 2'),
    (PARTIAL, {GRAPHS: "0"}, 'mode="reduce-overhead") on line 1'),
    ('m.compile(options={"max_autotune": 0})', {AUTOTUNE: "1"}, "sets inductor's max_autotune"),
    (CONFIG, {GRAPHS: "1"}, "inductor's triton.cudagraphs on line 2"),
    ("torch.set_num_threads(4)", {"OMP_NUM_THREADS": "8"}, "calls torch.set_num_threads"),
    ('os.environ.setdefault("NCCL_DEBUG", "WARN")', {INFO: "INFO"}, ""),
    ('os.environ["NCCL_DEBUG"] = "INFO"', {INFO: "INFO"}, ""),
    ('torch.compile(m, mode="default")', {AUTOTUNE: "0"}, ""),
    ('torch.compile(m, mode="max-autotune")', {AUTOTUNE: "1"}, ""),
    ("this is no Python (", {INFO: "INFO"}, ""),
)


def test_what_the_script_overrules_is_reported_with_its_line():
    def check(script: str, environ: dict[str, str], part: str) -> None:
        texts = " ".join(text for _, text in found(environ, script=script))
        assert part in texts if part else not texts

    check_cases(SCRIPTS, check)


def test_a_value_is_shown_on_one_line_without_secrets_and_not_endless():
    environ = {"TRITON_REDIS_KEY_FORMAT": "s3cretsecret", "NCCL_X": "a\nb" + "c" * 200}
    shown = str(audit.findings(environ, MachineFacts(torch=TORCH)))
    assert "s3cretsecret" not in shown
    assert "a\\\\nb" in shown
    assert "c" * 100 not in shown


REAL = [
    "expandable_segments:True",
    "expandable_segments: True",
    "expandable_segments:true",
    "max_split_size_mb:128",
    "max_split_size_mb:5",
    "max_split_size_mb=128",
    "max_split_size_mb:",
    "garbage_collection_threshold:0.8",
    "garbage_collection_threshold:1.0",
    "max_split_size_mb:128,roundup_power2_divisions:[256:1,512:2,>:8]",
    "large_segment_size_mb:20",
    "",
]


@pytest.mark.skipif(torch_before("2.10"), reason="torch 2.8 has no parser to be asked")
def test_values_of_the_allocator_are_judged_as_torch_parses_them():
    code = (
        "import json, sys, torch\n"
        "parse = torch._C._accelerator_setAllocatorSettings\n"
        "def good(text):\n"
        "    try: parse(text)\n"
        "    except Exception: return False\n"
        "    return True\n"
        "print(json.dumps([good(text) for text in json.loads(sys.argv[1])]))"
    )
    older = torch_before("2.11")
    texts = [text for text in REAL if not (older and text.startswith("large_segment_size_mb"))]
    run = [sys.executable, "-c", code, json.dumps(texts)]
    done = captured(*run, check=True)
    ours = [not list(alloc_conf.errors(text)) for text in texts]
    assert dict(zip(texts, ours, strict=True)) == dict(
        zip(texts, json.loads(done.stdout), strict=True)
    )


# Where it is shown


@pytest.fixture
def place(
    home: pathlib.Path, tmp_path: pathlib.Path
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """A directory with a script, and an environment without any of the variables in question."""
    write(tmp_path / "t.py", "print('done')\n")
    environ = {k: v for k, v in os.environ.items() if not k.startswith(judge.FAMILIES)}

    def run(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
        return captured(*SAFERUN, *arguments, cwd=tmp_path, env={**environ, **extra})

    return run


LAUNCH = ("--profile", "cpu", "--retries", "0", "--set", "launcher=python", "t.py")


def test_a_launch_reports_once_what_has_no_reader(place, tmp_path):
    def remarks(**environ: str) -> list[str]:
        done = place(*LAUNCH, **environ)
        assert done.stdout == "done\n"
        return [line for line in done.stderr.splitlines() if "no reader" in line]

    dead = {"TORCH_COMPILE_DISABLE_CUDAGRAPHS": "1"}
    (line,) = remarks(**dead, CUDA_HOME="/usr/local/cuda")
    assert line.startswith("saferun: TORCH_COMPILE_DISABLE_CUDAGRAPHS has no reader in torch")
    for mark in judge.NESTED:  # within a saferun, which has reported it
        assert remarks(**dead, **{mark: "1"}) == []
    write(tmp_path / "model.py", "X = 'NCCL_ALGOS'\n")
    (line,) = remarks(NCCL_ALGOS="ring", NCCL_DEUBG="INFO")
    assert "saferun: NCCL_DEUBG (NCCL_DEBUG?) has no reader" in line


def test_a_launch_of_code_that_is_not_here_reports_only_what_no_code_could_mean():
    request = requested("torchtitan.train", module="1")
    exported = {"TORCHINDUCTOR_NOBODYS": "1", "NCCL_DEUBG": "INFO"}
    remark = collect.remark(request, {}, MachineFacts(torch=TORCH), exported, "/nonexistent")
    assert remark == "NCCL_DEUBG (NCCL_DEBUG?) has no reader in torch 2.13.0 (see: saferun doctor)"


def test_a_plan_knows_what_the_jobs_code_reads_itself(tmp_path):
    for name, script, level in (
        ("NCCL_TIMEOUT", "os.environ.get('{}')", "ok"),
        ("TORCH_NCCL_TIMEOUT", "os.environ['{}'] = '1800'", "note"),  # only sets it
        ("TORCH_NCCL_OUR_TIMEOUT", "os.environ.get('{}')", "ok"),
        ("TORCH_NCCL_OUR_TIMEOUT", "", "note"),
    ):
        write(tmp_path / "t.py", script.format(name))
        request, exported = requested("t.py"), {name: "1800"}
        (one,) = collect.findings(request, MachineFacts(torch=TORCH), exported, str(tmp_path))
        assert one.level == level


def test_a_launch_does_not_report_what_saferun_sets_too():
    """Under torch 2.8 PYTORCH_ALLOC_CONF does work once a profile takes it into its own name."""
    request, exported = requested(None), {"PYTORCH_ALLOC_CONF": "max_split_size_mb:99"}
    for ours in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_DEBUG"):
        set_by_profile = {ours: Setting("x", "profiles/h100.yaml")}
        remark = collect.remark(request, set_by_profile, MachineFacts(torch="2.8.0"), exported, ".")
        assert bool(remark) == (ours == "NCCL_DEBUG")


def test_the_plan_shows_findings_and_its_json_keeps_its_keys(place, tmp_path):
    argv = ("--profile", "cpu", "t.py")
    dead = {"TORCH_COMPILE_DISABLE_CUDAGRAPHS": "1", "NCCL_DEBUG": "INFO"}
    write(tmp_path / "t.py", "import os\nos.environ['NCCL_DEBUG'] = 'WARN'\n")
    page = place("plan", *argv, **dead).stdout
    assert "your own settings" in page
    assert "TORCH_COMPILE_DISABLE_CUDAGRAPHS=1 has no reader" in page
    assert "fix: torch.compile(mode=" in page
    assert "NCCL_DEBUG=INFO: the script sets it itself, on line 2" in page
    other = place("plan", *argv, TF_CLI_CONFIG_FILE="a", NCCL_SOCKET_IFNAME="eth0").stdout
    assert "1 without a remark; `saferun doctor` lists all" in other
    assert "\n  resume             checkpoints none, args []\n" in other
    assert "your own settings" not in place("plan", *argv, TF_VAR_region="b").stdout
    plain = json.loads(place("plan", "--json", *argv).stdout)
    assert json.loads(place("plan", "--json", *argv, **dead).stdout).keys() == plain.keys()


def test_a_launch_looks_names_up_in_one_file_without_parsing_it():
    environ = {
        **dict.fromkeys(("CUDA_HOME", "NCCL_DEBUG", "OMP_NUM_THREADS", "TORCH_LOGS"), "1"),
        **dict.fromkeys(("NCCL_DEUBG", "NCCL_NO_SUCH", "TORCHINDUCTOR_NOTHING"), "1"),
    }
    program = ROOT / "tests" / "programs" / "audit" / "remark_cost.py"
    done = captured(sys.executable, str(program), json.dumps(environ), check=True)
    cost = json.loads(done.stdout)
    assert "NCCL_DEBUG?" in cost["line"]
    assert [pathlib.Path(path).name for path in cost["opened"]] == ["variables.yaml"]


def test_a_key_that_settings_yaml_may_not_have_is_refused(monkeypatch):
    document = {"settings": {"A": {"does": "something", "sorce": "https://s"}}}
    monkeypatch.setattr(loader, "load", lambda name: document)
    with pytest.raises(SaferunError, match="unknown key `sorce`"):
        effects.load()
