"""Unusual folders: read-only ones, names outside the locale's encoding, and runs without a best checkpoint."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from echelon.ground.errors import ConfigError
from echelon.learn.checkpoint.folder import checkpoint_of
from echelon.learn.data.tokenizer import build_bytes_tokenizer
from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import read_lines, write_recipe

pytestmark = pytest.mark.dist

LOCK = """
import os, sys
from pathlib import Path
from echelon.ground.errors import EchelonError
from echelon.run.folder.run_folder import RunFolder
if os.getuid() == 0:
    os.setuid(65534)
try:
    RunFolder(Path(sys.argv[1])).lock()
except EchelonError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


def test_a_read_only_run_folder_is_refused():
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # accessible to all users, unlike pytest's folders
        place = Path(folder)
        place.chmod(0o755)
        run = place / "run"
        RunFolder(run).create()
        (run / ".lock").touch()
        (run / ".lock").chmod(0o666)  # an existing run: only the lock can be acquired
        run.chmod(0o555)
        done = subprocess.run([sys.executable, "-c", LOCK, str(run)], capture_output=True, text=True, check=False)
        run.chmod(0o755)
    assert done.returncode == 2 and f"run.dir={run} cannot be written to" in done.stderr, done


def test_paths_work_in_a_locale_without_utf8(tmp_path):
    build_bytes_tokenizer().save_pretrained(tmp_path / "wörter")
    write_recipe(tmp_path, tokenizer="wörter")
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "echelon", "plan", "recipe.json", "--devices", "2xH100"],
        capture_output=True, check=False, cwd=tmp_path, env=environment,
    )  # fmt: skip
    assert done.returncode == 0 and b"vocab_size 256" in done.stdout, done


@pytest.mark.slow
def test_best_is_refused_without_a_recorded_best_checkpoint(echelon, tmp_path):
    write_recipe(tmp_path, data={"train": "text.txt", "sequence_len": 32, "validation_fraction": 0})
    assert echelon("train", "recipe.json", "--nproc", "1").code == 0
    run = RunFolder(tmp_path / "runs" / "tiny")
    assert not [row for row in read_lines(run.metrics_path) if row["kind"] == "eval"]
    with pytest.raises(ConfigError, match=r"this run has no evaluation, so no checkpoint is best; .* has steps 3, 6"):
        checkpoint_of(run.path, "best")
