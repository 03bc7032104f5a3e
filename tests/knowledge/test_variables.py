"""The data of the settings audit: what tools/variables.py finds, and what it writes."""

import pathlib

import pytest
import yaml
from repo import ROOT, installed_torch, tool
from sandbox import text_of, write

from saferun.audit import variable_index

DATA = ROOT / "src" / "saferun" / "knowledge" / "variables.yaml"


environment_readers, _ = tool("environment_readers"), tool("library_releases")
variables = tool("variables")


def found_in(tmp_path: pathlib.Path, source: str) -> dict[str, set[str]]:
    write(tmp_path / "module.py", source)
    return environment_readers.readers(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param('os.environ["TORCH_X"]', id="subscript"),
        pytest.param('os.environ.get("TORCH_X", "0")', id="get"),
        pytest.param('os.environ.pop("TORCH_X", None)', id="pop"),
        pytest.param('os.getenv("TORCH_X")', id="getenv"),
        pytest.param('"TORCH_X" in os.environ', id="in"),
        pytest.param('get_tristate_env("TORCH_X", True)', id="helper"),
        pytest.param('flag = Config(default=1, env_name_force="TORCH_X")', id="config-force"),
        pytest.param('flag = Config(default=1, env_name_default="TORCH_X")', id="config-default"),
        pytest.param('X_ENV = "TORCH_X"\nos.environ.get(X_ENV)', id="constant"),
        pytest.param('_get_env_int(["TORCH_X", "TORCH_Y"], 0)', id="list"),
        pytest.param('for each in ("TORCH_X", "B"):\n    os.environ.get(each)', id="loop"),
    ],
)
def test_a_read_in_python_is_found(tmp_path, source):
    assert found_in(tmp_path, source)["TORCH_X"] >= {"module.py"}


@pytest.mark.parametrize(
    "source",
    [
        pytest.param('os.environ["TORCH_X"] = "1"', id="write"),
        pytest.param('_set_env("TORCH_X", "1")', id="helper-that-writes"),
        pytest.param('env = 1\nprint("TORCH_X")', id="a-word-beside"),
        pytest.param('# env\ntorch.library.impl("CUDA_X")', id="another-call"),
        pytest.param('def _dump_DDP_relevant_env_vars():\n os.getenv("TORCH_X")', id="printed"),
    ],
)
def test_what_is_no_read_is_not_found(tmp_path, source):
    assert found_in(tmp_path, source) == {}


def test_a_name_carried_by_a_constant_of_another_module_is_found(tmp_path):
    write(tmp_path / "names.py", '# env\nNAMES = ["TORCH_X"]')
    assert "TORCH_X" in found_in(tmp_path, "os.environ.get(NAMES)  # 'TORCH_'")


def test_torchruns_own_options_are_read_with_their_prefix(tmp_path):
    source = 'parser.add_argument("--max-restarts", "--max_restarts", action=env, type=int)'
    assert set(found_in(tmp_path, source)) == {"PET_MAX_RESTARTS"}


@pytest.mark.parametrize(
    ("source", "way"),
    [
        ('os.environ.get("TORCH_X", "0") == "1"', "=1"),
        ('bool(os.environ.get("TORCH_X"))', "=any"),
        ('os.environ.get("TORCH_X") == "1" or os.environ.get("TORCH_X") == "yes"', None),
    ],
    ids=["compared-with-1", "only-asked-for", "both-ways"],
)
def test_how_a_value_is_used_is_known_where_all_reads_agree(tmp_path, source, way):
    ways = {file for file in found_in(tmp_path, source)["TORCH_X"] if file.startswith("=")}
    assert ways == ({way} if way else set())


def test_a_librarys_strings_are_names_after_any_other_constant(tmp_path):
    content = b"\x00NCCL_PLAIN\x00%s<unknown functioTORCH_BEHIND\x00\x7fCUDA_LATE\x00" % (
        b"_ZN4c10dL31TORCH_MANGLEDE\x00MY_NCCL_OTHER\x00TORCH_IN_TEXT is set\x00CUDA_ERROR_X\x00"
    )
    (tmp_path / "libx.so.1").write_bytes(content)
    assert environment_readers.readers(tmp_path) == {
        name: {"libx.so.1"} for name in ("NCCL_PLAIN", "TORCH_BEHIND", "CUDA_LATE")
    }


def test_a_header_that_reads_gives_its_names(tmp_path):
    write(tmp_path / "a.hpp", 'std::vector<std::string> TORCH_N = {"TORCH_NCCL_N", "NCCL_N"};')
    write(tmp_path / "b.h", '#define NAME "TORCH_NO_READ"')
    assert set(environment_readers.readers(tmp_path)) == {"TORCH_NCCL_N", "NCCL_N"}


READ_BY_TORCH = {
    "TORCHINDUCTOR_MAX_AUTOTUNE": "_inductor/config.py",
    "TORCHINDUCTOR_FX_GRAPH_CACHE": "_inductor/config.py",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "libtorch_cpu.so",
    "NCCL_BLOCKING_WAIT": "ProcessGroupNCCL.hpp",
    "PYTORCH_ALLOC_CONF": "libc10.so",
    "TORCH_DISABLE_DEADLOCK_DETECTION": "libc10.so",
    "GLOO_SOCKET_IFNAME": "libtorch_cpu.so",
    "PET_NPROC_PER_NODE": "distributed/run.py",
    "TORCH_LOGS": "_logging/_internal.py",
    "OMP_PROC_BIND": "libgomp.so.1",
}


@pytest.mark.slow
def test_the_data_agree_with_the_installed_torch():
    """One test, since reading the installed torch takes 10 s and more.

    After an upgrade of torch this asks for `python tools/variables.py add torch==X`.
    """
    folder, release = installed_torch()
    installed = environment_readers.readers(folder)
    missing = {n: file for n, file in READ_BY_TORCH.items() if file not in installed.get(n, ())}
    assert missing == {}
    assert not {"TORCH_COMPILE_DISABLE_CUDAGRAPHS", "TORCH_USE_CUDA_DSA"} & set(installed)

    data = variables.load()
    assert release in data.releases["torch"], f"python tools/variables.py add torch=={release}"
    in_data = {
        name: by["torch"]
        for name, by in data.variables.items()
        if release in by.get("torch", variable_index.Reader("", (), ())).releases
    }
    installed = installed.keys() - environment_readers.RECORDED["torch"]
    assert installed <= set(in_data)  # a CPU build lacks what CUDA's libraries read
    newest = data.releases["torch"][-1]
    by_source = {n for n, r in in_data.items() if r.files[0].endswith(".py") and newest == release}
    by_source |= {n for n, r in in_data.items() if r.releases[-1] == release and r.certain}
    assert by_source <= set(installed)


def test_the_data_cover_torch_from_2_4_on_without_a_gap():
    minors = {variable_index.version(release)[:2] for release in variables.load().releases["torch"]}
    newest = max(minors)
    assert newest >= (2, 15)
    assert minors == {(2, minor) for minor in range(4, newest[1] + 1)}


def test_the_file_is_what_the_tool_writes(tmp_path, monkeypatch):
    written = tmp_path / "variables.yaml"
    data = variables.load()
    monkeypatch.setattr(variables, "DATA", written)
    variables._write(data)
    assert text_of(written) == text_of(DATA), "python tools/variables.py check"


def test_settings_yaml_agrees_with_the_data(capsys):
    assert variables._check() == 0, capsys.readouterr().out


def test_every_setting_has_a_source_and_every_dead_one_a_fix():
    for name, entry in variables.yaml.safe_load(text_of(variables.EFFECTS))["settings"].items():
        assert entry["source"].startswith("https://"), name
        assert ("dead" in entry) == ("fix" in entry), name
        assert "dead" in entry or "does" in entry, name


def test_looking_a_name_up_in_the_text_is_reading_the_yaml():
    text = text_of(DATA)
    document = yaml.safe_load(text)
    known = {name for name, by in document["variables"].items() if by != variable_index.NOBODY}
    assert set(variable_index.names(text)) == known
    for library, known_releases in document["releases"].items():
        assert list(variable_index.releases(text, library)) == known_releases
    for name in known:
        by = variable_index.look_up(text, name)
        assert [r.library for r in by] == [
            p.split()[0] for p in document["variables"][name].split("; ")
        ]
    assert list(variable_index.listed(text, "others")) == document["others"]


EMPTY = variables.Data({}, {}, {})


def test_releases_merge_into_ranges_in_any_order():
    data = EMPTY
    for release in ("2.6.0", "2.4.0", "2.10.0", "2.5.0"):
        names = {"TORCH_ALWAYS": {"a.py"}}
        names |= {"TORCH_GAP": {"b.py"}} if release in ("2.4.0", "2.6.0") else {}
        data = variables.merge(data, "torch", release, names)
    text = variables.render(data)
    assert "  TORCH_ALWAYS: torch 2.4.0.. a.py\n" in text
    assert "  TORCH_GAP: torch 2.4.0..2.4.0,2.6.0..2.6.0 b.py\n" in text


def test_a_release_that_is_added_again_replaces_its_readers():
    data = variables.merge(EMPTY, "torch", "2.4.0", {"TORCH_A": {"a.py"}, "TORCH_B": {"b.py"}})
    data = variables.merge(data, "torch", "2.4.0", {"TORCH_B": {"c.py"}})
    assert data.variables == {
        "TORCH_B": {"torch": variable_index.Reader("torch", ("2.4.0",), ("c.py",))}
    }


def test_a_folder_is_added_to_the_data_and_another_library_kept(tmp_path, monkeypatch):
    package = tmp_path / "torch"
    write(package / "x.py", 'os.environ.get("TORCH_NEW") == "1"')
    monkeypatch.setattr(variables, "DATA", tmp_path / "variables.yaml")
    before = variables.merge(EMPTY, "nccl", "2.27.5", {"NCCL_OLD": {"libnccl.so.2"}})
    write(tmp_path / "variables.yaml", variables.render(before))
    variables._add_folder(package, "2.16.0")
    text = text_of(tmp_path / "variables.yaml")
    assert "  TORCH_NEW: torch 2.16.0.. x.py =1\n" in text
    assert "  NCCL_OLD: nccl 2.27.5.. libnccl.so.2\n" in text
    assert f"  TORCH_USE_CUDA_DSA: {variable_index.NOBODY}\n" in text


@pytest.mark.parametrize(
    "line",
    [
        'Requires-Dist: nvidia-nccl-cu12 (==2.20.5) ; platform_system == "Linux"',
        'Requires-Dist: nvidia-nccl-cu12==2.20.5; platform_system == "Linux"',
    ],
    ids=["in-brackets", "bare"],
)
def test_what_a_torch_requires_is_read_from_its_metadata(tmp_path, line):
    (tmp_path / "torch-2.4.0.dist-info").mkdir()
    write(
        tmp_path / "torch-2.4.0.dist-info" / "METADATA",
        f"Name: torch\n{line}\nRequires-Dist: triton~=3.8.0; platform_system == 'Linux'\n",
    )
    assert variables._needs(tmp_path) == {"nvidia-nccl-cu12": "2.20.5", "triton": "3.8.0"}
