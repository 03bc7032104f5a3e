"""Every value of a shipped profile has a reason and a source, and has an effect."""

import fnmatch
import re
import shlex

from cases import check_cases

from saferun.model import Checkpoint, Gpu, GpuFacts
from saferun.planning import resume
from saferun.profile import files
from saferun.profile.schema import Leaf
from saferun.settings import ResumePolicy, Value
from saferun.system import checkpoints

GPUS = {"a100", "h100", "h200", "b200", "rtx4090", "rtx5090"}
RESUME = {
    f"resume-{name}"
    for name in (
        *("nanogpt", "nanochat", "torchtitan", "hf", "accelerate", "diffusers", "lightning"),
        "deepspeed",
    )
}
SOURCE = re.compile(
    r"https://\S+\.\S+"  # a page, issue or pull request
    r"|incident: [a-z0-9-]+\.md"
    r"|measured: benchmarks/RESULTS\.md"
)
# Names as the driver reports them, and the profile that must know each; None is the fallback.
PRODUCTS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "A100-SXM4-40GB": "a100",
    "NVIDIA A100X": None,
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA GH200 480GB": "h100",
    "NVIDIA H800": None,
    "NVIDIA H200": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "b200",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA GeForce RTX 5080": None,
}


ENVIRON = {"HOME": "/nonexistent", "XDG_CACHE_HOME": "/proc/nowhere"}
CHAINS = {found.name: files.chain(found, ENVIRON) for found in files.known(ENVIRON)}
VALUES = {
    f"{name}:{key}": (key, leaf)
    for name, chain in CHAINS.items()
    for key, leaf in chain[-1].leaves.items()
}


def ancestor(name: str) -> str:
    """Return the farthest profile that a profile builds on."""
    return CHAINS[name][0].name


def merged(name: str) -> dict[str, Value]:
    """Return the values of a profile with its ancestors', `when:` left aside."""
    return {key: leaf.value for doc in CHAINS[name] for key, leaf in doc.leaves.items()}


def test_every_value_has_a_reason_and_a_source():
    """A page, an incident, or a measurement, whose reason then names its numbers."""

    def check(_: str, leaf: Leaf) -> None:
        assert leaf.why
        for source in leaf.source.split("; "):
            assert SOURCE.fullmatch(source), source
        if leaf.source == "measured: benchmarks/RESULTS.md":
            assert re.search(r"\d", leaf.why)

    check_cases(VALUES, check)


def test_the_values_of_a_profile_fit_together_under_all_conditions():
    check_cases([(chain,) for chain in CHAINS.values()], files.check_chain)
    assert all(chain[-1].description for chain in CHAINS.values())


def test_gpu_profiles_build_on_cuda_and_set_only_what_is_free():
    costly = ("hooks.compile.autotune", "hooks.compile.cudagraphs", "hooks.guards", "preflight")
    for name in sorted(GPUS | {"cuda"}):
        values = merged(name)
        assert ancestor(name) == "cuda"
        assert values["hooks.compile.enabled"] == "keep"
        assert not [key for key in values if key.startswith(costly)]


def test_no_profile_chooses_gpus_and_only_debug_blocks_launches():
    either = ("env.CUDA_VISIBLE_DEVICES", "env.CUDA_LAUNCH_BLOCKING")
    assert [one for one in VALUES if one.endswith(either)] == ["debug:env.CUDA_LAUNCH_BLOCKING"]


def test_the_cpu_profile_says_nothing_about_gpus():
    assert merged("cpu") == {"hooks.init.timeout_s": 1800}
    assert not re.search("cuda|nccl|gpu", str(CHAINS["cpu"][0].leaves), re.IGNORECASE)


def test_a_resume_recipe_is_nothing_else_and_fits_any_other_profile():
    for name in sorted(RESUME):
        assert merged(name).keys() == {"retry.resume.checkpoints", "retry.resume.args"}
        assert len(CHAINS[name]) == 1


# What the real programs take, as people start them.
RESUMED = {
    "resume-nanogpt": [
        ("config/gpt2.py --out_dir=o", "o/ckpt.pt", "config/gpt2.py --out_dir=o --init_from=resume")
    ],
    "resume-nanochat": [
        (
            "--resume-from-step -1",
            "/b/base_checkpoints/d20/meta_000100.json",
            "--resume-from-step=100",
        )
    ],
    "resume-torchtitan": [
        (
            "--job.config_file a.toml",
            "outputs/checkpoint/step-50",
            "--job.config_file a.toml --checkpoint.load_step=50",
        ),
        (
            "--module llama3 --dump_folder d",
            "d/checkpoint/step-50",
            "--module llama3 --dump_folder d --checkpoint.load_step=50",
        ),
    ],
    "resume-hf": [
        (
            "--output_dir o --do_train",
            "o/checkpoint-500",
            "--output_dir o --do_train --resume_from_checkpoint=o/checkpoint-500",
        ),
        ("output_dir=o", "o/checkpoint-5", "output_dir=o resume_from_checkpoint=o/checkpoint-5"),
    ],
    "resume-accelerate": [
        ("--output_dir o", "o/step_20", "--output_dir o --resume_from_checkpoint=o/step_20")
    ],
    "resume-diffusers": [
        (
            "--output_dir=o --use_ema",
            "o/checkpoint-500",
            "--output_dir=o --use_ema --resume_from_checkpoint=o/checkpoint-500",
        )
    ],
    "resume-lightning": [
        (
            "fit --config c.yaml",
            "./lightning_logs/version_0/checkpoints/epoch=1-step=64.ckpt",
            "fit --config c.yaml "
            "'--ckpt_path=./lightning_logs/version_0/checkpoints/epoch=1-step=64.ckpt'",
        )
    ],
    "resume-deepspeed": [
        ("--save c --load x", "c/global_step100", "--save c --load=c --load-tag=global_step100")
    ],
}


def test_a_recipe_finds_what_its_program_writes_and_gives_what_it_takes():
    assert RESUMED.keys() == RESUME

    def check(name: str, cases: list[tuple[str, str, str]]) -> None:
        values = merged(name)
        policy = ResumePolicy(values["retry.resume.checkpoints"], values["retry.resume.args"])
        for argv, path, expected in cases:
            given = shlex.split(argv)
            pattern = resume.pattern(policy, given, {"NANOCHAT_BASE_DIR": "/b"})
            assert fnmatch.fnmatch(path, pattern or ""), (path, pattern)
            found = Checkpoint(path, checkpoints.step_of(path), 0.0)
            made = resume.arguments(given, policy, found, {})
            assert made == tuple(shlex.split(expected))

    check_cases(RESUMED.items(), check)


def test_a_product_name_finds_one_profile_or_the_fallback():
    def check(product: str, profile: str | None) -> None:
        gpus = GpuFacts((Gpu(0, "GPU-0", product),), "proc")
        assert files.detect(gpus, ENVIRON)[0].name == (profile or "cuda")

    check_cases(PRODUCTS.items(), check)


# What each incident asks for, by the name under which it lives here.
NEEDS = [
    ("h100-llava", "hooks.compile.enabled", "off"),
    ("h100-llava", "preflight.mode", "require"),
    ("h100-llava", "env.CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    ("h100-nanochat", "hooks.compile.autotune", "off"),
    ("h100-nanochat", "hooks.compile.cudagraphs", "off"),
    ("h100-nanochat", "env.TORCHINDUCTOR_FX_GRAPH_CACHE", "1"),
    ("hpo", "launcher", "python"),
    ("hpo", "workers", 1),
    ("hpo", "retry.attempts_total", 1000),
    ("hpo", "env.PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    ("hpo", "hooks.memory.clear_between_trials", True),
    ("hpo", "hooks.optuna.mode", "on"),
    ("hpo", "hooks.optuna.recycle_every", 50),
    ("hpo", "hooks.guards.labels", "on"),
    ("hpo", "hooks.guards.logits", "on"),
    ("hpo", "locks.gpus", "wait"),
    ("hpo", "locks.slots", 3),
    ("ddp-safe", "hooks.cudagraph_markers", "off-when-distributed"),
    ("ddp-safe", "hooks.compile.cudagraphs", "off-when-distributed"),
    ("ddp-safe", "hooks.init.barrier", "store"),
    ("ddp-safe", "hooks.order.mode", "warn"),
    ("ddp-safe", "hooks.order.wrap_barrier", True),
    ("ddp-safe", "hooks.shards", "warn"),
    ("tf-rtx5090", "launcher", "python"),
    ("tf-rtx5090", "hooks.tensorflow.cross_device_ops", "hierarchical-copy"),
    ("tf-rtx5090", "hooks.tensorflow.memory_growth", True),
    ("tf-rtx5090", "env.NCCL_P2P_DISABLE", "1"),
    ("debug", "env.CUDA_LAUNCH_BLOCKING", "1"),
    ("debug", "env.TORCH_DISTRIBUTED_DEBUG", "DETAIL"),
    ("debug", "env.NCCL_DEBUG", "INFO"),
    ("debug", "retry.attempts", 1),
]


def test_an_incident_s_fix_is_in_its_profile():
    def check(name: str, key: str, value: Value) -> None:
        assert merged(name)[key] == value

    check_cases(NEEDS, check)


def test_the_llava_allocator_settings_are_the_incident_s_own():
    settings = str(merged("h100-llava")["env.PYTORCH_CUDA_ALLOC_CONF"]).split(",")
    assert sorted(settings) == [
        "expandable_segments:False",
        "garbage_collection_threshold:0.8",
        "max_split_size_mb:256",
    ]
