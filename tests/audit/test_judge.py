"""Who reads a variable: nobody, another release, somebody else; and what a launch says of it."""

from repo import ROOT, read_yaml
from requested import TORCH

from saferun.audit import judge
from saferun.knowledge import loader

TEXT = loader.variables_text()


def judged(name: str, torch: str | None = TORCH) -> tuple[str, str]:
    """Return the kind of a name's reading, and the near name or release."""
    reading = judge.judge(name, torch, TEXT)
    return reading.kind, reading.near


def remark(environ: dict[str, str], torch: str | None = TORCH) -> str:
    return judge.remark(judge.idle(environ, torch, TEXT), torch)


READINGS = {
    ("TORCHINDUCTOR_MAX_AUTOTUNE", TORCH): ("read", ""),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", TORCH): ("read", ""),
    ("NCCL_IB_HCA", TORCH): ("read", ""),
    ("TORCH_COMPILE_DISABLE_CUDAGRAPHS", TORCH): ("dead", ""),
    ("CUDA_VISIBLE_DEVICES_ORDER", TORCH): ("dead", ""),
    ("CUDA_AUTO_BOOST", None): ("dead", ""),
    ("TORCHINDUCTOR_ABI_COMPATIBLE", "2.5.1"): ("read", ""),
    ("TORCHINDUCTOR_ABI_COMPATIBLE", TORCH): ("gone", "torch 2.5.1"),
    ("PYTORCH_ALLOC_CONF", "2.8.0+cu126"): ("later", "torch 2.9.0"),
    ("PYTORCH_ALLOC_CONF", "2.9.0"): ("read", ""),
    ("TORCHINDUCTOR_NO_SUCH_THING", TORCH): ("owned", ""),
    ("NCCL_DEUBG", TORCH): ("misspelt", "NCCL_DEBUG"),
    ("CUDA_VISIBLE_DEVICE", TORCH): ("misspelt", "CUDA_VISIBLE_DEVICES"),
    ("CUDA_DEVICES_ORDER", TORCH): ("misspelt", "CUDA_DEVICE_ORDER"),
    ("NCCL_HEARTBEAT_TIMEOUT_SEC", TORCH): ("misspelt", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
    ("TORCH_NCCL_SOCKET_IFNAME", TORCH): ("misspelt", "NCCL_SOCKET_IFNAME"),
}


def test_a_name_is_judged_by_who_reads_it():
    assert {key: judged(*key) for key in READINGS} == READINGS


UNCERTAIN = (
    ("NCCL_OFI_ANYTHING", TORCH),  # a plug-in's
    ("TORCH_MY_OWN_SWITCH", TORCH),  # a script's own
    ("TF_VAR_region", TORCH),  # Terraform's
    ("CUDA_MODULE_LOADING", TORCH),  # the driver's, though torch stopped reading it
    ("CUDA_PATH_V12_1", TORCH),  # numbered
    ("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "2.4.0"),  # only tests read it
    ("TORCHINDUCTOR_ABI_COMPATIBLE", "2.13.0+rocm6.4"),  # another build
    ("NCCL_DEUBG", "2.13.0+rocm6.4"),  # RCCL's
    ("TORCHINDUCTOR_NO_SUCH_THING", "2.99.0"),  # newer torch than the data
    ("TORCHINDUCTOR_NO_SUCH_THING", None),  # torch unknown
    ("TORCHINDUCTOR_AUTO_CHUNKER", "2.11.0a0+git1"),  # between two releases
    ("TORCH_CUDNN_V8_API_ENABLED", "2.0.1"),  # older torch may have read it
    ("TORCHINDUCTOR_NPU_BACKEND", TORCH),  # torch-npu's
    ("TORCH_HCCL_BLOCKING_WAIT", TORCH),  # Ascend's counterpart of NCCL's
    ("NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE", TORCH),  # Google's
    ("PET_LOG_LEVEL", TORCH),  # of a program called pet
)


def test_what_is_not_certain_is_not_called_dead():
    wrong = {
        (name, torch): judged(name, torch)
        for name, torch in UNCERTAIN
        if judged(name, torch)[0] in judge.NO_EFFECT or remark({name: "1"}, torch)
    }
    assert wrong == {}


SLIPS = {
    **dict.fromkeys(("NCCL_DEBUGS", "NCCL_DEBU", "NCCL_DEBUH", "NCCL_DBEUG"), "NCCL_DEBUG"),
    **dict.fromkeys(("NCCL_DEBUG2", "NCCL_DBUEG1", "XCCL_DEBUG"), ""),
}


def test_one_slip_is_recognised_and_no_more():
    assert {n: judge.one_slip_away(n, ["NCCL_ALGO", "NCCL_DEBUG"]) for n in SLIPS} == SLIPS


def test_a_launch_names_all_that_has_no_reader_on_one_line():
    environ = {
        "TORCH_COMPILE_DISABLE_CUDAGRAPHS": "1",
        "NCCL_DEUBG": "INFO",
        "TORCHINDUCTOR_ABI_COMPATIBLE": "1",
        "NCCL_DEBUG": "INFO",
    }
    assert remark(environ) == (
        "NCCL_DEUBG (NCCL_DEBUG?), TORCHINDUCTOR_ABI_COMPATIBLE (torch 2.5.1 has) and "
        "TORCH_COMPILE_DISABLE_CUDAGRAPHS have no reader in torch 2.13.0 (see: saferun doctor)"
    )


def test_a_launch_without_such_settings_prints_nothing_and_with_many_no_long_line():
    for environ in ({"TORCHINDUCTOR_NOTHING": ""}, {"HOME": "/x", "NCCL_DEBUG": "INFO"}, {}):
        assert remark(environ) == ""
    line = remark({f"TORCHINDUCTOR_NOTHING_{letter}": "1" for letter in "ABCDEFG"})
    assert line.count("TORCHINDUCTOR") == judge.MOST_SHOWN
    assert " and 3 more have no reader" in line


def test_every_variable_of_the_shipped_profiles_has_a_reader():
    for path in (ROOT / "profiles").glob("*.yaml"):
        for name in read_yaml(path.read_text(encoding="utf-8")).get("env", {}):
            kind = judge.judge(name, TORCH, TEXT).kind
            assert kind not in judge.NO_EFFECT, (path.name, name)
