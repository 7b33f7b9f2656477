"""Prepared data in a container: brought back at later starts, also when SageMaker has copied only a part of it."""

import shutil

import pytest
import yaml

from echelon.launch.sagemaker import checkpoint_folder
from echelon.launch.sagemaker.checkpoint_folder import open_kept
from echelon.learn.data import prepare
from echelon.learn.data.prepare import prepare_data
from echelon.recipe.load import load_recipe
from tests.unit.recipe_samples import RECIPE

TEXT = "".join(f"{number} and {number} make {2 * number}.\n" for number in range(300))


class Container:
    """Starts of a container: only the checkpoint folder is the same, and the channel is copied anew."""

    def __init__(self, folder, monkeypatch):
        self.base = folder / "ml"
        self.writings = 0
        monkeypatch.setattr(checkpoint_folder, "find_large_disk", lambda base: (base / "disk", 2**40))
        write = prepare.write_folder

        def count(*arguments):
            self.writings += 1
            write(*arguments)

        monkeypatch.setattr(prepare, "write_folder", count)

    def start(self, text=TEXT):
        """Prepare the data as a training would; return the prepared folder and how often it was written."""
        data = self.base / "input" / "data"
        for path in (data, self.base / "disk"):
            shutil.rmtree(path, ignore_errors=True)
        (data / "train").mkdir(parents=True)
        (data / "train" / "text.txt").write_text(text)
        recipe = RECIPE | {"data": {"train": str(data / "train"), "sequence_len": 32}}
        path = self.base / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        keeper = open_kept(load_recipe(path)[0], self.base)
        self.writings = 0
        prepared = prepare_data(load_recipe(path, [f"data.prepared_dir={keeper.place}"])[0], verify=True)
        keeper.keep(wait=True)
        return prepared.path, self.writings

    @property
    def kept(self):
        return sorted((self.base / "checkpoints" / "prepared").glob("*"))


@pytest.fixture
def container(tmp_path, monkeypatch):
    return Container(tmp_path, monkeypatch)


def test_a_restart_uses_the_data_that_the_first_start_prepared(container):
    first, writings = container.start()
    assert writings == 1 and not first.is_symlink()
    assert [path.name for path in container.kept] == [first.name, f"{first.name}.json"]
    for _ in range(2):
        again, writings = container.start()
        assert (again, writings) == (first, 0)
        assert again.is_symlink() and again.resolve() == container.kept[0].resolve()
    other, writings = container.start(TEXT.replace("and", "AND"))  # of the same size
    assert writings == 1 and other.name != first.name


@pytest.mark.parametrize("damage", ["truncated", "missing", "unrecorded"])
def test_an_incomplete_copy_is_prepared_again(container, damage, caplog):
    first, _ = container.start()
    folder, record = container.kept
    shard = next(folder.glob("*.bin"))
    if damage == "truncated":
        shard.write_bytes(shard.read_bytes()[:-3])
    elif damage == "missing":
        (folder / "manifest.json").unlink()
    else:
        record.unlink()
    again, writings = container.start()
    assert (again, writings) == (first, 1)
    assert f"container: {folder} is incomplete, so the data is prepared again" in caplog.messages
    assert container.start()[1] == 0


def test_without_room_nothing_is_kept_and_the_job_goes_on(container, monkeypatch, caplog):
    monkeypatch.setattr(shutil, "disk_usage", lambda place: shutil._ntuple_diskusage(100, 99, 1))
    container.start()
    assert container.kept == []
    assert any("is not kept for later starts" in message and "1 B free" in message for message in caplog.messages)
