"""tensorflow.strategy=tpu where there is no TPU: TensorFlow's resolver is asked, and the refusal says what it found."""

from pathlib import Path

import pytest

from tests.dist.command import finish, start, write_recipe

pytest.importorskip("keras_hub")
pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ((), "TensorFlow found no TPU (TPU_NAME is not set): Please provide a TPU Name to connect to."),
        (("tensorflow.tpu=local",), "TensorFlow found no TPU (tensorflow.tpu=local): TPUs not found in the cluster."),
    ],
)
def test_no_tpu_is_found(tmp_path: Path, settings: tuple[str, ...], said: str) -> None:
    write_recipe(tmp_path)
    arguments = ("train", "recipe.json", "--nproc", "1", "engine=tensorflow", "tensorflow.strategy=tpu", *settings)
    ending = finish(start(*arguments, cwd=tmp_path), 300)
    assert ending.code == 2, ending
    errors = [line for line in ending.err.splitlines() if line.startswith("echelon: ")]
    assert len(errors) == 1 and "tensorflow.strategy=tpu: " + said in errors[0], ending
    assert "Set tensorflow.tpu to the name" in errors[0] and "tensorflow.strategy=multi_worker" in errors[0]
    assert not list((tmp_path / "runs" / "tiny" / "checkpoints").iterdir())
