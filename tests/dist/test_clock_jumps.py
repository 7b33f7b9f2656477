"""The machine's clock is set during a run: hours and dollars are those that have passed."""

import json
import shutil
import subprocess
import time

import pytest

from echelon.run.folder.run_folder import RunFolder
from tests.dist.command import finish, read_lines, start, write_recipe

pytestmark = [pytest.mark.dist, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]

DAY = 24 * 3600
STEPS = 30
# Adds the seconds in the file SHIFT_FILE, if there is one, to the clock that can be set.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <sys/time.h>
static long shift(void) {
    FILE *file = fopen(getenv("SHIFT_FILE"), "r");
    long seconds = 0;
    if (file) { if (fscanf(file, "%ld", &seconds) != 1) seconds = 0; fclose(file); }
    return seconds;
}
int clock_gettime(clockid_t id, struct timespec *found) {
    int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
    int code = real(id, found);
    if (id == CLOCK_REALTIME) found->tv_sec += shift();
    return code;
}
int gettimeofday(struct timeval *found, void *zone) {
    int (*real)(struct timeval *, void *) = dlsym(RTLD_NEXT, "gettimeofday");
    int code = real(found, zone);
    found->tv_sec += shift();
    return code;
}
time_t time(time_t *found) {
    time_t (*real)(time_t *) = dlsym(RTLD_NEXT, "time");
    time_t now = real(NULL) + shift();
    if (found) *found = now;
    return now;
}
"""


@pytest.fixture
def shim(tmp_path):
    """The variables for a process whose clock is set by writing to a file."""
    (tmp_path / "shim.c").write_text(SHIM)
    library = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, tmp_path / "shim.c", "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "SHIFT_FILE": str(tmp_path / "shift")}


@pytest.mark.slow
@pytest.mark.parametrize("days", [30, -30])
@pytest.mark.parametrize("moment", ["the start", "the training"])
def test_a_clock_that_is_set_uses_up_no_budget(tmp_path, shim, days, moment):
    write_recipe(tmp_path, train={"steps": STEPS, "eval_every": 10}, checkpoint={"every": 10})
    run = RunFolder(tmp_path / "runs" / "tiny")
    began = time.monotonic()
    process = start("train", "recipe.json", "--nproc", "1", "budget.max_hours=1", cwd=tmp_path, **shim)
    while not (run.recipe_path.exists() if moment == "the start" else run.rows.last_step() >= 3):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    (tmp_path / "shift").write_text(str(days * DAY))
    ending = finish(process, 120)
    passed = time.monotonic() - began
    assert ending.code == 0, ending
    assert 1 < json.loads(run.spending_path.read_text())["seconds"] < passed
    [goodput] = [event["seconds"] for event in read_lines(run.events_path) if event["event"] == "goodput"]
    assert all(seconds >= 0 for seconds in goodput.values()) and sum(goodput.values()) < passed
    events = [event["time"] for event in read_lines(run.events_path)]
    assert abs(events[-1] - time.time() - days * DAY) < 100, "the shim has no effect"

    if moment == "the start" and days > 0:  # in `make test`
        return
    (tmp_path / "shift").write_text("0")
    again = start("train", "recipe.json", "--nproc", "1", "budget.max_hours=1", f"train.steps={STEPS + 5}",
                  cwd=tmp_path, **shim)  # fmt: skip
    assert finish(again, 120).code == 0
    assert json.loads(run.spending_path.read_text())["seconds"] < time.monotonic() - began
