"""The folder of an export: a new one, or in place of the one before."""

import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.checkpoint.out_folder import written_folder


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
