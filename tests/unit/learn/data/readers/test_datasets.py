"""Folders of datasets that others have made: their own files are read, and a damaged one is one message."""

import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path

import datasets
import pytest

from echelon.ground.errors import DataError, EchelonError
from echelon.learn.data.readers import cut_file, read_records
from echelon.learn.data.readers.datasets import HubReader
from echelon.learn.data.readers.record import Reading, SourceFile
from echelon.learn.data.source import Source, list_files

OWN = [{"text": f"own {number}"} for number in range(3)]


@pytest.fixture(autouse=True)
def repository(tmp_path, monkeypatch):
    """A folder with a dataset, beside a file that is none of it."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "repository"
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, OWN)))
    (tmp_path / "secret.txt").write_text("a secret\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.txt").write_text("another secret\n")
    return folder


def configure(folder: Path, **config: object) -> None:
    text = json.dumps({"configs": [{"config_name": "default", **config}]})
    (folder / "README.md").write_text(f"---\n{text}\n---\n")


def read(path: Path, format: str = "hub") -> list[str]:
    spans = (span for file in list_files(Source("data.train.0", str(path), format)) for span in cut_file(file))
    return [record.content.decode() for span in spans for record in read_records(span, Reading())]


@pytest.mark.parametrize(
    "config",
    [
        {"data_files": "../secret.txt"},
        {"data_files": "data/../../secret.txt"},
        {"data_files": [{"split": "train", "path": ["data/train.jsonl", "../secret.txt"]}]},
        {"data_files": "../*.txt"},
        {"data_files": "HERE/secret.txt"},
        {"data_files": "file://HERE/secret.txt"},
        {"data_dir": "../other"},
        {"data_dir": "HERE/other"},
        {"data_files": "data/link.txt"},
        {"data_files": "inside/train.txt"},
        {"data_files": "memory://elsewhere/secret.txt"},
        {"data_files": "zip://*.txt::HERE/secret.zip"},
    ],
    ids=str,
)
def test_a_dataset_in_a_folder_reads_nothing_outside_of_it(tmp_path, repository, config):
    (repository / "data" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (repository / "inside").symlink_to(tmp_path / "other")
    shutil.make_archive(str(tmp_path / "secret"), "zip", tmp_path / "other")
    import fsspec

    fsspec.filesystem("memory").pipe_file("/elsewhere/secret.txt", b"a third secret\n")
    configure(repository, **json.loads(json.dumps(config).replace("HERE", str(tmp_path))))
    with pytest.raises(DataError, match=r"data\.train\.0.* with format: hub cannot be read \(") as caught:
        print(read(repository))
    assert "which is not in it" in str(caught.value) or "must be relative" in str(caught.value)


def test_a_dataset_in_a_folder_reads_its_own_files(tmp_path, repository):
    texts = [record["text"] for record in OWN]
    assert read(repository) == texts
    configure(repository, data_files="data/*.jsonl")
    assert read(repository) == texts
    configure(repository, data_dir="data")
    assert read(repository) == texts
    (repository / "link.jsonl").symlink_to("data/train.jsonl")
    configure(repository, data_files="link.jsonl")
    assert read(repository) == texts
    (tmp_path / "way").symlink_to(repository)
    assert read(tmp_path / "way") == texts


def test_a_download_of_the_hubs_client_is_read(tmp_path):
    snapshot, blobs = tmp_path / "snapshots" / "0a1b", tmp_path / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "77").write_text(json.dumps(OWN[0]))
    (snapshot / "train.jsonl").symlink_to("../../blobs/77")
    assert read(snapshot) == ["own 0"]
    (snapshot / "train.jsonl").unlink()
    (snapshot / "train.jsonl").symlink_to("../../secret.txt")
    with pytest.raises(DataError, match="which is not in it"):
        read(snapshot)


def test_a_dataset_of_the_hub_reads_no_file_of_this_machine(repository, monkeypatch):
    monkeypatch.chdir(repository / "data")
    file = SourceFile(Path("json"), "json", "hub", 0, 0, True, split="train")
    with pytest.raises(EchelonError, match=r"names .*train\.jsonl, which is not in it"):
        list(HubReader().walk(file))


def test_what_datasets_cannot_read_is_one_message(repository):
    script = repository.with_name("scripted")
    script.mkdir()
    (script / "scripted.py").write_text("raise SystemExit('executed')")
    archive = repository.with_name("archive")
    archive.mkdir()
    with tarfile.open(archive / "train.tar", "w") as tar:
        content = pickle.dumps(print)
        member = tarfile.TarInfo("0.pth")
        member.size = len(content)
        tar.addfile(member, io.BytesIO(content))
    yaml = repository.with_name("yaml")
    yaml.mkdir()
    (yaml / "README.md").write_text("---\nconfigs: !!python/object/apply:os.system ['touch executed']\n---\n")
    for folder in (script, archive, yaml):
        with pytest.raises(EchelonError, match=rf"{folder.name}.* cannot be read .*\(.+\)"):
            read(folder)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("state.json", []),
        ("state.json", {"_data_files": 3}),
        ("state.json", {"_data_files": [{"filename": ["x"]}]}),
        ("state.json", {"_data_files": [{"filename": "gone.arrow"}]}),
        ("state.json", {"_data_files": [{"filename": "../other.arrow"}]}),
        ("state.json", {"_data_files": [{"filename": "HERE/other.arrow"}]}),
        ("dataset_dict.json", {"splits": "../other"}),
        ("dataset_dict.json", {"splits": ["../other"]}),
    ],
)
def test_a_damaged_saved_dataset_is_one_message(tmp_path, name, content):
    for folder in ("saved", "other"):
        datasets.Dataset.from_list(OWN).save_to_disk(tmp_path / folder)
    shutil.copy(next((tmp_path / "other").glob("*.arrow")), tmp_path / "other.arrow")
    assert read(tmp_path / "saved", "auto") == ["own 0", "own 1", "own 2"]
    (tmp_path / "saved" / name).write_text(json.dumps(content).replace("HERE", str(tmp_path)))
    for split in (None, "train[:1]"):
        with pytest.raises(DataError, match=r"saved is a damaged save_to_disk dataset \(.+\); save it again"):
            list_files(Source("data.train.0", str(tmp_path / "saved"), split=split))


def test_a_damaged_file_of_a_saved_dataset_is_one_message(tmp_path):
    datasets.Dataset.from_list(OWN).save_to_disk(tmp_path / "saved")
    [file] = (tmp_path / "saved").glob("*.arrow")
    file.write_bytes(b"no arrow")
    with pytest.raises(DataError, match=rf"saved is a damaged save_to_disk dataset \({file.name}: "):
        list_files(Source("data.train.0", str(tmp_path / "saved"), split="train[:1]"))
