"""What is a complete checkpoint, for what the libraries really write, cut at any place."""

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from saferun.system import checkpoints


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that torch, its distributed.checkpoint, safetensors and accelerate wrote."""
    import torch
    import torch.distributed.checkpoint as dcp
    from accelerate import Accelerator
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("written")
    tensors = {"a": torch.rand(200, 300), "b": torch.rand(7)}
    torch.save({"model": tensors, "step": 3}, folder / "ckpt.pt")
    save_file(tensors, folder / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is a single process
        dcp.save({"model": tensors, "step": 7}, checkpoint_id=folder / "step-7")
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(model, optimizer)
    accelerator.save_state(str(folder / "step_20"))
    trainer = folder / "checkpoint-30"
    trainer.mkdir()
    save_file(tensors, trainer / "model.safetensors")
    torch.save(optimizer.state_dict(), trainer / "optimizer.pt")
    (trainer / "trainer_state.json").write_text(json.dumps({"global_step": 30}), encoding="utf-8")
    return {path.name: path for path in folder.iterdir()}


NAMES = ("ckpt.pt", "model.safetensors", "step-7", "step_20", "checkpoint-30")


@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_with_a_large_file_cut_anywhere_is_not_complete(written, name):
    whole = written[name]
    assert checkpoints.problem(str(whole)) == ""
    files = [whole] if whole.is_file() else [f for f in whole.rglob("*") if f.is_file()]
    for file in files:
        content, at = file.read_bytes(), file.stat().st_mtime
        for size in {0, 3, len(content) // 3, len(content) - 30, len(content) - 1}:
            file.write_bytes(content[: max(0, size)])
            assert checkpoints.problem(str(whole)), (file.name, size, len(content))
        file.write_bytes(content)
        os.utime(file, (at, at))
    assert checkpoints.problem(str(whole)) == ""


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("step-7", ".metadata"),
        ("step-7", "__0_0.distcp"),
        ("step_20", "random_states_0.pkl"),
        ("checkpoint-30", "trainer_state.json"),
    ],
)
def test_without_the_file_that_the_library_writes_last_it_is_not_complete(written, name, last):
    missing = written[name] / last
    content = missing.read_bytes()
    missing.unlink()
    try:
        assert last in checkpoints.problem(str(written[name]))
    finally:
        missing.write_bytes(content)


def test_a_directory_that_is_being_written_over_is_not_complete(written):
    shard = written["step-7"] / "__0_0.distcp"
    at = (written["step-7"] / ".metadata").stat().st_mtime
    os.utime(shard, (at + 60, at + 60))
    assert "newer than .metadata" in checkpoints.problem(str(written["step-7"]))
    os.utime(shard, (at, at))
    assert checkpoints.problem(str(written["step-7"])) == ""


MAIN_ALONE = ["unet.bin", "optimizer.bin", "random_states_0.pkl"]  # diffusers' examples
BOTH = [*MAIN_ALONE, "random_states_1.pkl"]
TRAINERS = ["pytorch_model.bin", "optimizer.pt", "rng_state_0.pth", "rng_state_1.pth"]


@pytest.mark.parametrize(
    ("names", "other", "said"),
    [
        (MAIN_ALONE, [], ""),
        (MAIN_ALONE, MAIN_ALONE, ""),
        (BOTH, MAIN_ALONE, ""),
        (MAIN_ALONE, BOTH, "1 of 2 files random_states_N are there"),
        (MAIN_ALONE, [*BOTH, "random_states_2.pkl"], "1 of 2 files"),  # of four ranks, once
        (["optimizer.bin", "random_states_1.pkl"], [], "1 of 2 files"),
        (MAIN_ALONE, [*MAIN_ALONE, "custom_checkpoint_0.pkl"], "0 of 1 files custom_checkpoint_N"),
        ([*TRAINERS, "trainer_state.json"], [], ""),
        ([*TRAINERS[:3], "trainer_state.json"], [], "1 of 2 files rng_state_N"),
        (TRAINERS, [], "trainer_state.json is missing"),
        (TRAINERS[:1], [*TRAINERS, "trainer_state.json"], "trainer_state.json is missing"),
        (["model.pt", "optim.pt"], [], ""),  # not the Trainer's
        (["pytorch_model.bin"], ["pytorch_model.bin"], ""),
    ],
)
def test_what_a_loader_does_without_is_wanted_only_where_the_program_writes_it(
    tmp_path, names, other, said
):
    made = {"checkpoint-20": names, "checkpoint-10": other}
    for folder, files in made.items():
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).write_text('{"of": "a file"}', encoding="utf-8")
    paths = [str(tmp_path / folder) for folder, files in made.items() if files]
    reason = checkpoints.problem(paths[0], 2, paths)
    assert said in reason
    assert bool(said) == bool(reason)


@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_an_hdf5_file_is_as_long_as_its_superblock_says(tmp_path, version):
    at = {0: 40, 1: 44}.get(version, 28)
    head = (b"\x89HDF\r\n\x1a\n" + bytes([version])).ljust(at, b"\0") + (2048).to_bytes(8, "little")
    path = tmp_path / "model.weights.h5"
    path.write_bytes(head.ljust(2048, b"\0"))
    assert checkpoints.problem(str(path)) == ""
    for size in (2047, 96, 30):
        os.truncate(path, size)
        assert checkpoints.problem(str(path)), size


def nanochat(folder: Path, whole: Path, ranks: int) -> Path:
    folder.mkdir(exist_ok=True)
    meta = folder / "meta_000100.json"
    meta.write_text("{}", encoding="utf-8")
    for name in ("model_000100.pt", *(f"optim_000100_rank{rank}.pt" for rank in range(ranks))):
        (folder / name).write_bytes(whole.read_bytes())
    return meta


def test_nanochats_three_files_must_be_there_for_every_rank(written, tmp_path):
    meta = nanochat(tmp_path / "d4", written["ckpt.pt"], 2)
    assert checkpoints.problem(str(meta), ranks=2) == ""
    assert "2 of 3" in checkpoints.problem(str(meta), ranks=3)
    for name in ("model_000100.pt", "optim_000100_rank0.pt", "optim_000100_rank1.pt"):
        (tmp_path / "d4" / name).rename(tmp_path / "aside")
        assert checkpoints.problem(str(meta), ranks=2), name
        (tmp_path / "aside").rename(tmp_path / "d4" / name)


def test_deepspeeds_tag_counts_once_the_file_latest_names_it_or_a_later_one(written, tmp_path):
    for tag in ("global_step10", "global_step20"):
        (tmp_path / tag).mkdir()
        states = tmp_path / tag / "mp_rank_00_model_states.pt"
        states.write_bytes(written["ckpt.pt"].read_bytes())
    ten, twenty = (str(tmp_path / tag) for tag in ("global_step10", "global_step20"))
    assert "latest" in checkpoints.problem(ten)
    (tmp_path / "latest").write_text("global_step10", encoding="utf-8")
    assert checkpoints.problem(ten) == ""
    assert checkpoints.problem(twenty) == "`latest` names global_step10"
    (tmp_path / "latest").write_text("global_step20", encoding="utf-8")
    assert (checkpoints.problem(ten), checkpoints.problem(twenty)) == ("", "")


def test_where_deepspeeds_file_latest_was_cut_only_the_tag_written_last_is_in_doubt(
    written, tmp_path
):
    content = written["ckpt.pt"].read_bytes()
    for second, tag in enumerate(("global_step10", "global_step30", "global_step20")):
        (tmp_path / tag).mkdir()
        states = tmp_path / tag / "mp_rank_00_model_states.pt"
        states.write_bytes(content)
        os.utime(states, (second, second))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "later").touch()
    (tmp_path / "latest").touch()
    assert checkpoints.problem(str(tmp_path / "global_step10")) == ""
    assert checkpoints.problem(str(tmp_path / "global_step30")) == ""
    assert "`latest` is empty" in checkpoints.problem(str(tmp_path / "global_step20"))


def test_what_is_empty_or_missing_is_not_complete(tmp_path):
    assert checkpoints.problem(str(tmp_path)) == "it is empty"
    assert "No such file" in checkpoints.problem(str(tmp_path / "none.pt"))
    (tmp_path / "a.zip").touch()
    assert checkpoints.problem(str(tmp_path / "a.zip")) == "it is empty"
    index = tmp_path / "shards" / "model.safetensors.index.json"
    index.parent.mkdir()
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}), encoding="utf-8")
    assert "model-1.safetensors is missing" in checkpoints.problem(str(index.parent))


def test_nothing_of_a_checkpoint_is_executed(tmp_path):
    class Bad:
        def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
            return os.system, (f"touch {tmp_path / 'executed'}",)

    import pickle

    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-1" / "__0_0.distcp").write_bytes(b"x")
    (tmp_path / "step-1" / ".metadata").write_bytes(pickle.dumps(Bad()))
    checkpoints.problem(str(tmp_path / "step-1"))
    assert not (tmp_path / "executed").exists()


def aged(path: Path, at: int) -> Path:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("x", encoding="utf-8")
    os.utime(path, (at, at))
    return path


def test_the_newest_write_comes_first_a_link_counts_as_its_target_and_drafts_do_not(tmp_path):
    aged(tmp_path / "out" / "checkpoint-9" / "deep" / "a", 3000)
    aged(tmp_path / "out" / "checkpoint-10" / "a", 2000)
    aged(tmp_path / "out" / "checkpoint-11.tmp", 4000)
    (tmp_path / "out" / "checkpoint-last").symlink_to("checkpoint-9")
    (tmp_path / "out" / "checkpoint-12").mkdir()
    found = [one.checkpoint for one in checkpoints.find(f"{tmp_path}/out/checkpoint-*")]
    assert [(Path(one.path).name, one.step, one.at_s) for one in found] == [
        ("checkpoint-9", 9, 3000.0),
        ("checkpoint-10", 10, 2000.0),
    ]


def test_the_time_of_writing_is_from_the_first_birth_to_the_last_write(tmp_path):
    born = os.stat(aged(tmp_path / "c" / "a", 0)).st_ctime
    later = aged(tmp_path / "c" / "b", int(born) + 100)
    took = checkpoints.write_time_s(str(later.parent), os.environ)
    if took is None:
        pytest.skip("this file system keeps no time of birth")
    assert 98 <= took <= 102
    assert checkpoints.write_time_s(str(tmp_path / "none"), os.environ) is None
