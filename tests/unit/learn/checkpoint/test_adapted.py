"""What a command reads of a run besides its weights, which a stranger may have made, and the folder of an export."""

import json

import pytest

from echelon.ground.checksums import write_manifest
from echelon.ground.errors import CheckpointError, ConfigError
from echelon.ground.run_files import RunFiles
from echelon.learn.checkpoint.adapted import load_run_tokenizer
from echelon.learn.checkpoint.out_folder import written_folder
from echelon.learn.data.tokenizer import build_bytes_tokenizer


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}),
        ("tokenizer.json", [1, 2]),
        ("tokenizer_config.json", {"tokenizer_class": 5}),
    ],
)
def test_a_tokenizer_that_cannot_be_loaded_is_refused_and_its_code_not_run(tmp_path, name, content):
    folder = RunFiles(tmp_path).model_dir
    build_bytes_tokenizer().save_pretrained(folder)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Own: pass\n")
    write_manifest(folder)
    assert load_run_tokenizer(tmp_path)("ab")["input_ids"] == [97, 98]
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="is damaged"):  # the checksums, which a stranger may have made too
        load_run_tokenizer(tmp_path)
    write_manifest(folder)
    with pytest.raises(ConfigError, match=r"model: the tokenizer of the run cannot be loaded \(.*code in a run folder"):
        load_run_tokenizer(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_is_replaced_only_if_asked_and_only_when_the_new_one_is_complete(tmp_path):
    out = tmp_path / "out"
    for content in ("first", "second"):
        with written_folder(out, replace=True) as writing:
            (writing / content).touch()
            assert out.exists() == (content == "second")
        assert [path.name for path in out.iterdir()] == [content]
    with pytest.raises(RuntimeError), written_folder(out, replace=True):
        raise RuntimeError
    with pytest.raises(ConfigError, match="exists and is not an empty folder"), written_folder(out):
        pass
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "second"]
