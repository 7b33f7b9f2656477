"""Checkpoints of DeepSpeed, built by hand: how weights are divided among ranks, and what is refused."""

import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from echelon.foreign.zero_folder import is_zero_folder, read_zero_folder
from echelon.ground.errors import CheckpointError
from tests.fuzz.damage import put_odd_file

SHAPES = [OrderedDict(a=torch.Size([2, 3]), b=torch.Size([3])), OrderedDict(c=torch.Size([2]))]


class Calls:
    """Pickled as a call of a function."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def write(folder: Path, stage: int, flats: list[list[list[float]]], **model: Any) -> Path:
    """A checkpoint of two ranks, with the flat values of each rank and group."""
    step = folder / "step"
    step.mkdir(parents=True)
    (folder / "latest").write_text("step")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    for rank, groups in enumerate(flats):
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        state = {"zero_stage": stage, "partition_count": 2, key: [torch.tensor(each) for each in groups]}
        torch.save({"optimizer_state_dict": state}, step / f"{name}_optim_states.pt")
        content = {"module": {"table": torch.ones(2)}, "buffer_names": ["table"], "param_shapes": SHAPES, **model}
        if stage == 3 or rank == 0:
            torch.save(content, step / f"{name if stage == 3 else 'mp_rank_00'}_model_states.pt")
    return folder


def test_stages_1_and_2_cut_a_group_anywhere(tmp_path: Path) -> None:
    """Nine values, the padding of one, and five on each rank; then two values in another group."""
    flats = [[[0.0, 1, 2, 3, 4], [9.0]], [[5.0, 6, 7, 8, -1], [10.0]]]
    found = read_zero_folder(write(tmp_path, 2, flats))
    assert found.tensors["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found.tensors["b"].tolist() == [6, 7, 8] and found.tensors["c"].tolist() == [9, 10]
    assert found.tensors["table"].tolist() == [1, 1]
    assert "ZeRO stage 2, 2 processes" in found.described


def test_stage_3_cuts_each_weight(tmp_path: Path) -> None:
    """`a` is three values on each rank, `b` two with one of padding, `c` one."""
    flats = [[[0.0, 1, 2, 6, 7, 9]], [[3.0, 4, 5, 8, -1, 10]]]
    found = read_zero_folder(write(tmp_path, 3, flats)).tensors
    assert found["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["b"].tolist() == [6, 7, 8] and found["c"].tolist() == [9, 10]


def test_a_file_that_calls_a_function_is_refused(tmp_path: Path) -> None:
    made = tmp_path / "made"
    folder = write(tmp_path / "run", 3, [[[0.0] * 6], [[0.0] * 6]], epoch=Calls(made))
    with pytest.raises(CheckpointError, match="cannot be read without running code in it"):
        read_zero_folder(folder)
    assert not made.exists()


@pytest.mark.parametrize(
    ("flats", "model", "said"),
    [
        ([[[0.0] * 5], [[0.0] * 6]], {}, "is damaged, or of a version of DeepSpeed"),
        ([[[0.0] * 6]], {}, "step is of 2 processes, and has the files of 1"),
        ([[[0.0] * 6], [[0.0] * 6]], {"mp_world_size": 2}, "is of tensor or pipeline parallelism"),
        ([[[0.0] * 6], [[0.0] * 6]], {"param_shapes": None}, "is damaged, or of a version of DeepSpeed"),
    ],
)
def test_what_is_not_whole_is_refused(tmp_path: Path, flats: Any, model: dict[str, Any], said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_zero_folder(write(tmp_path, 3, flats, **model))


@pytest.mark.parametrize("pattern", ["*_model_states.pt", "*_optim_states.pt"])
@pytest.mark.parametrize("content", [None, 3, [1], torch.ones(2), "text"], ids=str)
def test_a_file_with_another_value_is_refused(tmp_path: Path, pattern: str, content: Any) -> None:
    folder = write(tmp_path, 2, [[[0.0, 1, 2, 3, 4], [9.0]], [[5.0, 6, 7, 8, -1], [10.0]]])
    [path, *_] = sorted(folder.glob(f"step/{pattern}"))
    torch.save(content, path)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged.*type {type(content).__name__} instead"):
        read_zero_folder(folder)


@pytest.mark.parametrize("stage", [2, 3])
def test_every_changed_value_is_found(tmp_path: Path, stage: int) -> None:
    """torch itself reads a file whose records differ from their checksums."""
    flats = {2: [[[0.0, 1, 2, 3, 4], [9.0]], [[5.0, 6, 7, 8, -1], [10.0]]], 3: [[[0.0, 1, 2, 6, 7, 9]]] * 2}[stage]
    folder = write(tmp_path, stage, flats)
    path = next(iter(sorted(folder.glob("step/*_optim_states.pt"))))
    content = path.read_bytes()
    value = np.float32(2.0).tobytes()
    place = content.index(np.float32(1.0).tobytes() + value) + 4
    path.write_bytes(content[:place] + np.float32(3.0).tobytes() + content[place + 4 :])
    torch.load(path, weights_only=True)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged: its record .*data.* is not as written"):
        read_zero_folder(folder)


def test_a_record_marked_as_a_folder_is_found(tmp_path: Path) -> None:
    """torch gives whatever is in memory for it, and its checksum is right."""
    folder = write(tmp_path, 3, [[[0.0, 1, 2, 6, 7, 9]]] * 2)
    path = next(iter(sorted(folder.glob("step/*_optim_states.pt"))))
    with zipfile.ZipFile(path) as archive:
        start, records = archive.start_dir, archive.infolist()
    content = bytearray(path.read_bytes())
    for record in records:  # an entry of the directory: 46 bytes, then its name
        if record.filename.endswith("data/0"):
            content[start + 38] |= 0x10
        start += 46 + len(record.filename) + len(record.extra)
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{path.name} is damaged: its record .*data/0 is not as written"):
        read_zero_folder(folder)


def test_other_folders_are_not_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "latest").write_text("../elsewhere")
    assert not is_zero_folder(tmp_path)


@pytest.mark.parametrize("what", ["a pipe", "a device"])
@pytest.mark.parametrize(
    "name", ["zero_pp_rank_0_mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt"]
)
def test_a_file_without_an_end_is_refused(tmp_path, what, name):
    """A pipe would wait for its writer, and a device fill the memory."""
    folder = write(tmp_path, 3, [[[0.0, 1, 2, 6, 7, 9]]] * 2)
    [path] = folder.glob(f"**/{name}")
    put_odd_file(path, what)
    with pytest.raises(CheckpointError, match=f"{name} is damaged.*not a regular file"):
        read_zero_folder(folder)
