"""Skipped files of a data folder are reported, and no text is in both training and validation data."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from echelon.ground.errors import DataError
from echelon.learn.data.corpus import describe_left_out, list_corpus
from echelon.learn.data.source import LeftOut, Source, list_files


def source(path, **fields):
    return Source("data.train.0", str(path), **fields)


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names_of(path):
    return [file.name for file in list_files(source(path))]


def messages_of(path, **fields):
    return list(describe_left_out(list_corpus([source(path, **fields)], [])))


def test_one_message_counts_all_skipped_files(tmp_path):
    write(
        tmp_path, "a.txt", ".x.txt", ".git/config", "node_modules/y.js", "sub/image.png", "image.bin", "table.parquet"
    )
    (tmp_path / "table.parquet").unlink()
    (tmp_path / "empty.md").touch()
    (tmp_path / "gone.txt").symlink_to(tmp_path / "nowhere.txt")
    assert names_of(tmp_path) == ["a.txt", "empty.md"]
    assert messages_of(tmp_path) == [
        f"data.train.0: not read in {tmp_path}: broken links and special files: 1 (gone.txt); "
        "empty files: 1 (empty.md); files of other formats: 2 (image.bin, ...); "
        "folders of caches and packages: 1 (node_modules); hidden files: 1 (.x.txt); hidden folders: 1 (.git)"
    ]
    write(tmp_path / "plain", "a.txt", "b.md")
    assert messages_of(tmp_path / "plain") == []


def test_files_of_other_formats_are_skipped_and_counted(tmp_path):
    write(tmp_path, "a.md", "b.csv", "c.md")
    (tmp_path / "x.jsonl").write_text('{"text": "x"}\n')
    assert messages_of(tmp_path, format="jsonl") == [
        f"data.train.0: not read in {tmp_path}: files of other formats: 3 (a.md, ...)"
    ]


def test_links_to_folders_are_followed_each_real_folder_once(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    write(data, "b/one.txt", "z.txt")
    write(elsewhere, "two.txt", "deep/three.txt", ".hidden.txt")
    (data / "a").symlink_to(data / "b")  # real folders keep their own names
    (data / "far").symlink_to(elsewhere)
    (data / "far-again").symlink_to(elsewhere)
    (data / "up").symlink_to(tmp_path)  # contains the folder itself
    (elsewhere / "round").symlink_to(elsewhere)
    (elsewhere / "deep" / "back").symlink_to(data)
    assert names_of(data) == ["b/one.txt", "far/deep/three.txt", "far/two.txt", "z.txt"]
    [line] = messages_of(data)
    assert "links to folders that are already read or contain this one: 5 (a, ...)" in line
    assert "hidden files: 1 (far/.hidden.txt)" in line


def test_a_glob_that_links_make_endless_is_refused(tmp_path):
    """Python's would visit 2^40 folders. The folder itself is read, each part once."""
    write(tmp_path / "text", "a.txt", "b/c.txt")
    (tmp_path / "text" / "again").symlink_to(".")
    assert len(list_files(source(tmp_path / "text" / "**" / "*.txt"))) == 2
    (tmp_path / "text" / "b" / "back").symlink_to("..")
    with pytest.raises(
        DataError, match=r"data\.train\.0\.path=.*: links lead to the same folders in more than 10,000,000"
    ):
        list_files(source(tmp_path / "text" / "**" / "*.txt"))
    for number in range(30):  # no circle, but 3^30 ways to its end
        write(tmp_path / "chain" / f"{number}", "x.txt")
        for name in "abc":
            (tmp_path / "chain" / f"{number}" / name).symlink_to(f"../{number + 1}")
    with pytest.raises(DataError, match="links lead to the same folders"):
        list_files(source(tmp_path / "chain" / "0" / "**" / "*.txt"))
    assert names_of(tmp_path / "text") == ["a.txt", "b/c.txt"]
    assert len(names_of(tmp_path / "chain" / "0")) == 30


def test_a_folder_that_cannot_be_listed_is_refused_as_a_file_is(tmp_path, monkeypatch):
    write(tmp_path, "a.txt", "locked/b.txt")
    listed = os.scandir

    def scandir(path):
        if Path(path).name == "locked":  # the tests may run as root
            raise PermissionError(13, "Permission denied", str(path))
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(
        DataError, match=r"data\.train\.0\.path=.*: the folder .*locked cannot be read \(Permission den"
    ):
        list_files(source(tmp_path))


@pytest.mark.parametrize("way", ["the same path", "symbolic link", "hard link", "copy"])
def test_a_copy_of_validation_text_is_refused_as_training_text(tmp_path, way):
    write(tmp_path, "train/a.txt", "train/b.txt", "held/other.txt")
    train, held = tmp_path / "train" / "a.txt", tmp_path / "held" / "c.txt"
    match way:
        case "symbolic link":
            held.symlink_to(train)
        case "hard link":
            held.hardlink_to(train)
        case "copy":
            held.write_bytes(train.read_bytes())
        case _:
            held = train
    validation = replace(source(held.parent), key="data.validation.0")
    with pytest.raises(DataError, match=r"data\.validation\.0\.path=.*must not be trained on"):
        list_corpus([source(train.parent)], [validation])
    if held != train:
        held.unlink()
        held.write_text("train/x.txt")  # different text of the same size
        assert len(list_corpus([source(train.parent)], [validation])) == 2


def test_megatron_files_of_equal_indices_are_compared_by_their_ids(tmp_path):
    for name, ids in (("a", b"\1\0" * 8), ("b", b"\2\0" * 8)):
        (tmp_path / f"{name}.bin").write_bytes(ids)
        (tmp_path / f"{name}.idx").write_bytes(b"MMIDIDX\x00\x00" + bytes(40))
    train = source(tmp_path / "a.idx", format="megatron")
    validation = Source("data.validation.0", str(tmp_path / "b.idx"), "megatron")
    assert len(list_corpus([train], [validation])) == 2
    (tmp_path / "b.bin").write_bytes((tmp_path / "a.bin").read_bytes())
    with pytest.raises(DataError, match=r"a copy of .*a\.idx in data\.train"):
        list_corpus([train], [validation])


def test_skipped_files_are_reported_with_the_first_path_per_reason():
    left_out = LeftOut()
    assert left_out.describe() is None
    for place in ("b", "a", "c"):
        left_out.note("odd files", place)
    assert left_out.describe() == "odd files: 3 (a, ...)"
