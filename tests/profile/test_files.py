"""Finding, reading and choosing profiles."""

import json
import os
import pathlib

import jsonschema
import pytest
import yaml
from cases import check_cases
from sandbox import text_of, write

from saferun.errors import ProfileError
from saferun.model import Gpu, GpuFacts
from saferun.profile import files as profiles
from saferun.profile import schema, yaml_reader
from saferun.system import paths

H100 = "NVIDIA H100 80GB HBM3"


@pytest.fixture
def place(home: pathlib.Path, tmp_path: pathlib.Path) -> tuple[pathlib.Path, dict[str, str]]:
    """A working directory and an environment with a fresh home."""
    cwd = tmp_path / "work"
    cwd.mkdir()
    return cwd, {"HOME": str(home)}


def own(home: dict, name: str, text: str) -> pathlib.Path:
    return write(pathlib.Path(profiles.user_dir(home)) / f"{name}.yaml", text)


def gpus(*names: str) -> GpuFacts:
    return GpuFacts(tuple(Gpu(i, f"GPU-{i}", n) for i, n in enumerate(names)), "proc")


def chosen(wanted, place, gpu=GpuFacts()):  # noqa: B008 (a frozen value)
    cwd, environ = place
    return profiles.choose(wanted, "--profile", environ, str(cwd), gpu)


def test_ancestors_come_first_and_each_once(place):
    own(place[1], "mine", "schema: 1\nextends: [h100, cuda, ddp-safe]\n")
    names = [doc.name for doc in chosen("mine", place).chain]
    assert names == ["cuda", "h100", "ddp-safe", "mine"]


def test_a_profile_may_extend_the_shipped_one_of_its_own_name(place):
    own(place[1], "h100", "schema: 1\nextends: [h100]\nenv: {X: '1'}\n")
    chain = chosen("h100", place).chain
    assert [doc.name for doc in chain] == ["cuda", "h100", "h100"]
    assert "env.X" in chain[-1].leaves


def test_shipped_profiles_that_cannot_be_read_are_named(place, tmp_path, monkeypatch):
    monkeypatch.setattr(paths, "shipped", lambda name: str(tmp_path / name))
    with pytest.raises(ProfileError, match="no profile can be read") as raised:
        chosen(None, place)
    assert str(tmp_path / "profiles") in str(raised.value)


def test_a_circle_of_profiles_is_named(place):
    own(place[1], "a", "schema: 1\nextends: [b]\n")
    own(place[1], "b", "schema: 1\nextends: [a]\n")
    with pytest.raises(ProfileError, match=r"circle; a.yaml -> b.yaml -> a.yaml"):
        chosen("a", place)
    own(place[1], "c", "schema: 1\nextends: [c]\n")
    with pytest.raises(ProfileError, match="`c` extends itself"):
        chosen("c", place)


def test_an_unknown_ancestor_is_named_with_the_file(place):
    path = own(place[1], "a", "schema: 1\nextends: [h10]\n")
    with pytest.raises(ProfileError, match=r"unknown profile `h10`.*did you mean `h100`") as caught:
        chosen("a", place)
    assert str(path) in str(caught.value)


def test_a_file_beside_us_is_offered_and_never_taken_silently(place):
    write(place[0] / "mine.yaml", "schema: 1\n")
    with pytest.raises(ProfileError, match=r"--profile ./mine.yaml"):
        chosen("mine", place)
    assert chosen("./mine.yaml", place).chain[-1].name == "mine"
    write(place[0] / "h100.yaml", "schema: 1\nextends: [./mine.yaml]\nenv: {X: '1'}\n")
    assert "env.X" not in chosen("h100", place).chain[-1].leaves
    assert [d.name for d in chosen("./h100.yaml", place).chain] == ["mine", "h100"]
    with pytest.raises(ProfileError, match=r"did you mean `h100`\? known: a100, b200, cpu"):
        chosen("h10O", place)


def test_saferun_yaml_of_a_shipped_name_is_said_aloud(place):
    write(place[0] / "saferun.yaml", "schema: 1\nname: h100\nenv: {X: '1'}\n")
    choice = chosen("h100", place)
    assert "env.X" in choice.chain[-1].leaves
    assert "./saferun.yaml" in choice.remarks[0]
    choice = chosen(None, place, gpus("NVIDIA B200"))
    assert (choice.chain[-1].name, choice.named, choice.origin) == ("h100", True, "./saferun.yaml")


@pytest.mark.parametrize(
    ("names", "profile"),
    [
        ([], "cpu"),
        ([H100] * 8, "h100"),
        (["NVIDIA GH100"], "cuda"),
        (["NVIDIA GeForce RTX 4090"], "rtx4090"),
        (["NVIDIA GeForce GTX 1080 Ti"], "cuda"),
        ([H100, "NVIDIA H100 PCIe"], "h100"),
        ([H100, "NVIDIA A100-SXM4-80GB"], "cuda"),
        ([H100, "NVIDIA GeForce GTX 1080 Ti"], "cuda"),
        ([""], "cuda"),
    ],
)
def test_the_product_name_decides_where_no_profile_is_named(place, names, profile):
    choice = chosen(None, place, gpus(*names))
    assert (choice.chain[-1].name, choice.named) == (profile, False)
    assert bool(choice.remarks) == (len(set(names)) > 1 and profile == "cuda")


def test_the_longest_fragment_wins_and_the_users_own_comes_first(place):
    own(place[1], "laptop", "schema: 1\nmatch: {gpu: [RTX 4090 Laptop GPU]}\n")
    name = "NVIDIA GeForce RTX 4090 Laptop GPU"
    assert chosen(None, place, gpus(name)).chain[-1].name == "laptop"
    assert chosen(None, place, gpus("NVIDIA GeForce RTX 4090")).chain[-1].name == "rtx4090"
    own(place[1], "mine", "schema: 1\nmatch: {gpu: [H100]}\n")
    assert chosen(None, place, gpus(H100)).chain[-1].name == "mine"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "not UTF-8"),
        (b"#" * (10 * 1024 * 1024), "larger than 256 KiB"),
        (None, "cannot be read"),
    ],
    ids=["binary", "10 MB", "a directory"],
)
def test_a_file_that_is_no_text_is_refused(place, content, message):
    path = place[0] / "p.yaml"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    with pytest.raises(ProfileError, match=message):
        chosen("./p.yaml", place)


def cache_files(environ) -> list[pathlib.Path]:
    return list(pathlib.Path(environ["HOME"], ".cache/saferun/profiles").glob("*.json"))


def test_a_second_read_parses_nothing_and_gives_the_same(place, monkeypatch):
    first = chosen("h100-nanochat", place).chain
    monkeypatch.setattr(yaml_reader, "parse", lambda *a: pytest.fail("parsed again"))
    assert chosen("h100-nanochat", place).chain == first
    assert all(f.stat().st_mode & 0o777 == 0o600 for f in cache_files(place[1]))


@pytest.mark.parametrize("garbage", [b"{", b"[]", b'{"format": 1}', b"\xff", "link", "no home"])
def test_a_cache_that_cannot_be_used_changes_nothing(place, tmp_path, garbage):
    expected = chosen("h100", place).chain
    victim = tmp_path / "victim"
    write(victim, "precious")
    for file in cache_files(place[1]):
        file.unlink()
        if garbage == "link":
            file.symlink_to(victim)
        elif garbage != "no home":
            file.write_bytes(garbage)
    if garbage == "no home":
        place[1]["HOME"] = str(victim)
    assert chosen("h100", place).chain == expected
    assert text_of(victim) == "precious"
    path = place[0] / "p.yaml"
    for value in ("1", "2"):  # a change within one clock tick
        write(path, f"schema: 1\nenv: {{X: '{value}'}}\n")
        os.utime(path, (1, 1))
        assert chosen("./p.yaml", place).chain[-1].leaves["env.X"].value == value


def shipped() -> list[profiles.Found]:
    return list(profiles._listed(paths.shipped("profiles"), "profiles"))


def test_the_json_schema_is_a_schema_and_accepts_what_we_ship():
    printed = json.loads(json.dumps(schema.json_schema()))
    jsonschema.Draft202012Validator.check_schema(printed)
    validator = jsonschema.Draft202012Validator(printed)

    def accepted(found: profiles.Found) -> None:
        validator.validate(yaml.safe_load(text_of(pathlib.Path(found.path))))

    check_cases([(found,) for found in shipped()], accepted)


def test_the_json_schema_refuses_what_we_refuse():
    validator = jsonschema.Draft202012Validator(schema.json_schema())

    def refused(text: str) -> None:
        assert not validator.is_valid(yaml.safe_load(text))
        assert yaml_reader.check(text, "p.yaml")[1]

    texts = ["hoks: {}", "retry: {attempts: 0}", "env: [1]"]
    check_cases([("schema: 2",), *((f"schema: 1\n{text}",) for text in texts)], refused)
