"""What the fuzz tests may leave out: an operation whose files are all as they were."""

import os
import shutil
from threading import Thread

from tests.fuzz.damage import ODD_FILES, put_odd_file
from tests.fuzz.touched import Known, Restorer, read_state, record


def look(folder):
    """Open a file in another thread, ask about one, list a folder, and write a result."""
    thread = Thread(target=(folder / "read").read_text)
    thread.start()
    thread.join()
    (folder / "asked").exists()
    os.listdir(folder / "listed")
    (folder / "result").write_text("done")


def know(folder):
    """Make the files, and run the operation on them."""
    (folder / "listed").mkdir()
    for name in ("read", "asked", "listed/entry", "other"):
        (folder / name).write_text("x")
    before = read_state(folder, ())
    with record(folder) as touched:
        look(folder)
    known = Known(before, read_state(folder, ()), touched, {})
    (folder / "result").unlink()
    return known


def test_a_change_of_what_an_operation_touches_is_found(tmp_path):
    known = know(tmp_path)
    assert known.holds(read_state(tmp_path, ()))
    for name, content, holds in (
        ("read", "y", False), ("asked", "y", False), ("result", "y", False), ("listed/new", "y", False),
        ("other", "y", True), ("listed/entry", "y", True), ("new", "y", True),
    ):  # fmt: skip
        path = tmp_path / name
        kept = path.read_text() if path.exists() else None
        path.write_text(content)
        assert known.holds(read_state(tmp_path, ())) is holds, name
        path.unlink() if kept is None else path.write_text(kept)
    for what in ODD_FILES:
        put_odd_file(tmp_path / "read", what)
        assert not known.holds(read_state(tmp_path, ())), what
        (tmp_path / "read").rmdir() if what == "a folder" else (tmp_path / "read").unlink()


def test_the_result_of_an_operation_left_out_is_in_the_state(tmp_path):
    known = know(tmp_path)
    now = read_state(tmp_path, ())
    assert "result" not in now
    assert known.apply(now) == now | {"result": b"done"} == known.after


def test_all_that_was_done_to_a_folder_is_undone(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    know(folder)
    restorer, before = Restorer(folder, tmp_path / "aside"), read_state(folder, ())
    restorer.restore()
    kept = (folder / "asked").stat().st_ino
    for what in ODD_FILES:
        put_odd_file(folder / "read", what)
        (folder / "new" / "deep").mkdir(parents=True)
        (folder / "new" / "deep" / "file").write_text("x")
        (folder / "listed" / "entry").write_text("y")  # of the same size
        (folder / "other").unlink()
        restorer.restore()
        assert read_state(folder, ()) == before, what
    shutil.rmtree(folder / "listed")
    restorer.restore()
    assert read_state(folder, ()) == before
    assert (folder / "asked").stat().st_ino == kept  # it was left as it was
