"""Every value of a shipped profile has a reason and a source, and has an effect."""

from __future__ import annotations

import fnmatch
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from cases import check_cases

from saferun.model import Checkpoint
from saferun.planning import resume
from saferun.settings import ResumePolicy
from saferun.system import checkpoints

PROFILES = Path(__file__).parents[2] / "profiles"
GPUS = {"a100", "h100", "h200", "b200", "rtx4090", "rtx5090"}
INCIDENTS = {"h100-llava", "h100-nanochat", "hpo", "ddp-safe", "tf-rtx5090", "debug"}
RESUME = {
    f"resume-{name}"
    for name in (
        *("nanogpt", "nanochat", "torchtitan", "hf", "accelerate", "diffusers", "lightning"),
        "deepspeed",
    )
}
HEAD = {"schema", "name", "description", "extends", "match"}
LEAF = {"value", "why", "source", "when"}
SOURCE = re.compile(
    r"https://\S+\.\S+"  # a page, issue or pull request
    r"|incident: [a-z0-9-]+\.md"  # one of the five incident documents
    r"|measured: benchmarks/RESULTS\.md"
)
INCIDENT_DOCUMENTS = {
    "cuda-fragmentation-hpo.md",
    "ddp-sigsegv-order-and-markers.md",
    "h100-cuda-initialization-llava.md",
    "h100-inductor-autotune-nanochat.md",
    "rtx5090-tensorflow-nccl.md",
}
WITHOUT_EFFECT = {
    "CUDA_VISIBLE_DEVICES": "which GPUs a job has is for the scheduler or the user to decide",
    "CUDA_VISIBLE_DEVICES_ORDER": "nothing reads it",
    "CUDA_AUTO_BOOST": "nothing reads it",
    "TORCH_COMPILE_DISABLE_CUDAGRAPHS": "nothing reads it",
    "TORCH_USE_CUDA_DSA": "it is a build flag",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "0 is the default, and mode= overrides it",
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "0 is the default",
    "PYTORCH_ALLOC_CONF": "CUDA reads it from torch 2.10 on; the older name always works",
}
# Names as the driver reports them, and the profile that must know each; None is the fallback.
PRODUCTS = {
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-PCIE-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100",
    "A100-SXM4-40GB": "a100",
    "NVIDIA A100X": None,
    "NVIDIA A800-SXM4-80GB": None,
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100",
    "NVIDIA H100 NVL": "h100",
    "NVIDIA GH200 480GB": "h100",
    "NVIDIA H800": None,
    "NVIDIA H20": None,
    "NVIDIA H200": "h200",
    "NVIDIA H200 NVL": "h200",
    "NVIDIA B200": "b200",
    "NVIDIA GB200": "b200",
    "NVIDIA GB300": None,
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4090 D": "rtx4090",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA GeForce RTX 5080": None,
    "NVIDIA RTX 6000 Ada Generation": None,
}


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((PROFILES / f"{name}.yaml").read_text(encoding="utf-8"))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, node) of everything that is not a group of further keys."""
    for key, node in tree.items():
        if not path and key in HEAD:
            continue
        dotted = f"{path}.{key}" if path else key
        if isinstance(node, dict) and not LEAF & set(node):
            yield from leaves(node, dotted)
        else:
            yield dotted, node


def ancestry(name: str) -> list[str]:
    """Return a profile and all that it builds on, farthest first."""
    above = [a for parent in load(name).get("extends", []) for a in ancestry(parent)]
    return [*above, name]


def merged(name: str) -> dict[str, Any]:
    """Return the values of a profile with its ancestors', `when:` left aside."""
    return {key: leaf["value"] for part in ancestry(name) for key, leaf in leaves(load(part))}


NAMES = sorted(path.stem for path in PROFILES.glob("*.yaml"))
VALUES = {f"{name}:{key}": (key, leaf) for name in NAMES for key, leaf in leaves(load(name))}


def test_the_shipped_profiles_are_those_that_the_design_names() -> None:
    assert set(NAMES) == {"cpu", "cuda"} | GPUS | INCIDENTS | RESUME


def test_a_profile_is_named_like_its_file_and_describes_its_purpose() -> None:
    for name in NAMES:
        profile = load(name)
        assert (profile["schema"], profile["name"]) == (1, name)
        assert profile["description"], name
        text = (PROFILES / f"{name}.yaml").read_text(encoding="utf-8")
        assert text.startswith("# For ") or name == "cuda", name


def test_every_value_has_a_reason_and_a_source() -> None:
    def check(_: str, leaf: Any) -> None:
        assert isinstance(leaf, dict), "a bare value, without why and source"
        assert {"value", "why", "source"} <= set(leaf) <= LEAF

    check_cases(VALUES, check)


def test_every_why_is_one_or_two_plain_sentences() -> None:
    def check(_: str, leaf: Any) -> None:
        why = leaf["why"].strip()
        assert why.endswith(".")
        assert len(re.findall(r"\.(?=\s|$)", why)) <= 2
        assert len(why) <= 300
        assert "\n" not in why, "fold it (>-): it becomes one line of a comment or of `plan`"

    check_cases(VALUES, check)


def test_every_source_is_a_web_page_an_incident_or_a_measurement() -> None:
    def check(_: str, leaf: Any) -> None:
        for source in leaf["source"].split("; "):
            assert SOURCE.fullmatch(source), source
            if source.startswith("incident: "):
                assert source.removeprefix("incident: ") in INCIDENT_DOCUMENTS

    check_cases(VALUES, check)


def test_a_measured_reason_names_its_numbers() -> None:
    def check(_: str, leaf: Any) -> None:
        if leaf["source"] == "measured: benchmarks/RESULTS.md":
            assert re.search(r"\d", leaf["why"])

    check_cases(VALUES, check)


def test_conditions_are_the_three_that_exist() -> None:
    def check(_: str, leaf: Any) -> None:
        when = leaf.get("when", {})
        assert set(when) <= {"torch", "gpus", "distributed"}
        for name in ("torch", "gpus"):
            assert re.fullmatch(r"([<>=!]=?[\d.]+)(,[<>=!]=?[\d.]+)*", when.get(name, ">0"))

    check_cases(VALUES, check)


def test_a_variable_s_value_is_text() -> None:
    def check(key: str, leaf: Any) -> None:
        if key.startswith("env."):
            assert isinstance(leaf["value"], str), f'write "{leaf["value"]}" in quotes'

    check_cases(VALUES, check)


def setters(variable: str) -> list[str]:
    """Return the profiles that set an environment variable."""
    return [value.split(":")[0] for value, (key, _) in VALUES.items() if key == f"env.{variable}"]


def test_no_profile_sets_a_variable_without_effect() -> None:
    def check(variable: str, reason: str) -> None:
        assert not setters(variable), reason

    check_cases(WITHOUT_EFFECT.items(), check)


def test_gpu_profiles_build_on_cuda_and_set_only_what_is_free() -> None:
    costly = ("hooks.compile.autotune", "hooks.compile.cudagraphs", "hooks.guards", "preflight")
    for name in sorted(GPUS | {"cuda"}):
        values = merged(name)
        assert ancestry(name)[0] == "cuda"
        assert values["hooks.compile.enabled"] == "keep"
        assert "env.CUDA_LAUNCH_BLOCKING" not in values
        assert not [key for key in values if key.startswith(costly)]


def test_launch_blocking_is_for_debugging_only() -> None:
    assert setters("CUDA_LAUNCH_BLOCKING") == ["debug"]


def test_the_cpu_profile_says_nothing_about_gpus() -> None:
    text = "".join(key + str(leaf) for key, leaf in leaves(load("cpu")))
    assert not re.search("cuda|nccl|gpu", text, re.IGNORECASE)
    assert merged("cpu") == {"hooks.init.timeout_s": 1800}


def test_only_gpu_profiles_match_a_product() -> None:
    assert {name for name in NAMES if "match" in load(name)} == GPUS


def test_incident_profiles_build_on_a_gpu_profile() -> None:
    for name in sorted(INCIDENTS):
        assert ancestry(name)[0] == "cuda"
        assert "match" not in load(name)


def test_a_resume_recipe_is_nothing_else_and_fits_any_other_profile() -> None:
    for name in sorted(RESUME):
        values = merged(name)
        assert values.keys() == {"retry.resume.checkpoints", "retry.resume.args"}
        assert "extends" not in load(name)


# What the real programs take, as people start them.
RESUMED = {
    "resume-nanogpt": [
        (
            "config/gpt2.py --out_dir=o",
            "o/ckpt.pt",
            "config/gpt2.py --out_dir=o --init_from=resume",
        ),
        ("--init_from=scratch", "out/ckpt.pt", "--init_from=resume"),
    ],
    "resume-nanochat": [
        (
            "--depth=12",
            "/b/base_checkpoints/d12/meta_000100.json",
            "--depth=12 --resume-from-step=100",
        ),
        (
            "--resume-from-step -1",
            "/b/base_checkpoints/d20/meta_000100.json",
            "--resume-from-step=100",
        ),
    ],
    "resume-torchtitan": [
        (
            "--job.config_file a.toml",
            "outputs/checkpoint/step-50",
            "--job.config_file a.toml --checkpoint.load_step=50",
        ),
        (
            "--job.dump_folder=d",
            "d/checkpoint/step-50",
            "--job.dump_folder=d --checkpoint.load_step=50",
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
        (
            "--output-dir=o --resume-from-checkpoint x",
            "o/checkpoint-500",
            "--output-dir=o --resume-from-checkpoint=o/checkpoint-500",
        ),
        ("output_dir=o", "o/checkpoint-5", "output_dir=o resume_from_checkpoint=o/checkpoint-5"),
    ],
    "resume-accelerate": [
        ("--output_dir o", "o/step_20", "--output_dir o --resume_from_checkpoint=o/step_20"),
        ("--output_dir o", "o/epoch_1", "--output_dir o --resume_from_checkpoint=o/epoch_1"),
    ],
    "resume-diffusers": [
        (
            "--output_dir=o --use_ema",
            "o/checkpoint-500",
            "--output_dir=o --use_ema --resume_from_checkpoint=o/checkpoint-500",
        ),
    ],
    "resume-lightning": [
        (
            "fit --config c.yaml",
            "./lightning_logs/version_0/checkpoints/epoch=1-step=64.ckpt",
            "fit --config c.yaml "
            "'--ckpt_path=./lightning_logs/version_0/checkpoints/epoch=1-step=64.ckpt'",
        ),
    ],
    "resume-deepspeed": [
        (
            "--save c --load x",
            "c/global_step100",
            "--save c --load=c --load-tag=global_step100",
        ),
    ],
}


def test_a_recipe_finds_what_its_program_writes_and_gives_what_it_takes() -> None:
    assert RESUMED.keys() == RESUME

    def check(name: str, cases: list[tuple[str, str, str]]) -> None:
        values = merged(name)
        args = tuple(values["retry.resume.args"])
        policy = ResumePolicy(values["retry.resume.checkpoints"], args)
        for argv, path, expected in cases:
            given = shlex.split(argv)
            pattern = resume.pattern(policy, given, {"NANOCHAT_BASE_DIR": "/b"})
            assert fnmatch.fnmatch(path, pattern or ""), (path, pattern)
            found = Checkpoint(path, checkpoints.step_of(path), 0.0)
            made = resume.arguments(given, policy, found, {})
            assert made == tuple(shlex.split(expected))

    check_cases(RESUMED.items(), check)


def test_markers_are_off_only_where_graphs_are_off_with_them() -> None:
    for name in NAMES:
        values = merged(name)
        markers = values.get("hooks.cudagraph_markers", "keep")
        if markers not in ("keep", False):
            assert values["hooks.compile.cudagraphs"] == markers, name


def test_a_product_name_finds_one_profile_or_the_fallback() -> None:
    fragments = [(name, fragment) for name in GPUS for fragment in load(name)["match"]["gpu"]]

    def check(product: str, profile: str | None) -> None:
        found = [
            name
            for name, fragment in fragments
            if re.search(rf"(?<!\w){re.escape(fragment)}(?!\w)", product, re.IGNORECASE)
        ]
        assert found == ([profile] if profile else [])

    check_cases(PRODUCTS.items(), check)


# What each incident asks for, by the name under which it lives here.
NEEDS = [
    ("h100-llava", "hooks.compile.enabled", False),  # YAML reads `off` as false
    ("h100-llava", "preflight.mode", "require"),
    ("h100-llava", "env.CUDA_DEVICE_ORDER", "PCI_BUS_ID"),
    ("h100-nanochat", "hooks.compile.autotune", False),
    ("h100-nanochat", "hooks.compile.cudagraphs", False),
    ("h100-nanochat", "env.TORCHINDUCTOR_FX_GRAPH_CACHE", "1"),
    ("hpo", "launcher", "python"),
    ("hpo", "workers", 1),
    ("hpo", "retry.attempts_total", 1000),
    ("hpo", "env.PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),
    ("hpo", "hooks.memory.clear_between_trials", True),
    ("hpo", "hooks.optuna.mode", True),
    ("hpo", "hooks.optuna.recycle_every", 50),
    ("hpo", "hooks.guards.labels", True),
    ("hpo", "hooks.guards.logits", True),
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


def test_an_incident_s_fix_is_in_its_profile() -> None:
    def check(name: str, key: str, value: Any) -> None:
        assert merged(name)[key] == value

    check_cases(NEEDS, check)


def test_the_llava_allocator_settings_are_the_incident_s_own() -> None:
    settings = merged("h100-llava")["env.PYTORCH_CUDA_ALLOC_CONF"].split(",")
    assert sorted(settings) == [
        "expandable_segments:False",
        "garbage_collection_threshold:0.8",
        "max_split_size_mb:256",
    ]
