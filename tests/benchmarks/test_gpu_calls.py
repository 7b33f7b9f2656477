"""The numbered calls of benchmarks/gpu.sh: a part that fails, hangs or does not fit stops no other one.

The slow tests run each call on this machine's CPU with `--size tiny`.
"""

import json
import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import ghosts
import gpu_calls
import nccl_on_one_gpu
import pretraining
from echelon.ground.launch_environment import torch_environment
from gpu_calls import (
    CALLS,
    GRACE_SECONDS,
    INSTALL_SECONDS,
    MAX_FILES,
    MINUTES,
    PREFLIGHT_SECONDS,
    Part,
    Runner,
    build_environment,
    describe_source,
)
from kernel_table import Kernels, find_kind, render_kernels
from measuring import NotHere, measure_rows
from preflight import describe_package
from tests import constraints
from tests.waiting import wait_until
from turns import Side, find_error, take_turns

ROOT = Path(__file__).parents[2]

PRINTS = ("-c", "print('| a | b |'); print('a message', file=__import__('sys').stderr)")
FAILS = ("-c", "print('so far'); raise SystemExit('a planted failure')")
REPORTS = ("-c", "import time\ntry: time.sleep(99)\nexcept KeyboardInterrupt: print('what it has')")
# Ignores SIGINT, and starts a process that would outlive it.
STAYS = (
    "-c",
    "import pathlib, signal, subprocess, sys, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
    "child = subprocess.Popen(['sleep', '99'])\npathlib.Path(sys.argv[1]).write_text(str(child.pid))\ntime.sleep(99)",
)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_other_parts_run_after_one_that_fails_and_ones_that_hang(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_calls, "GRACE_SECONDS", 0.5)
    out, pid_file = tmp_path / "out", tmp_path / "pid"
    out.mkdir()
    runner = Runner(out, "A call")
    for part in (
        Part("fails", FAILS, 60, 1, is_table=False),
        Part("reports", REPORTS, 1.5, 1, is_table=False),
        Part("stays", (*STAYS, str(pid_file)), 1.5, 1),
        Part("prints", PRINTS, 60, 1),
    ):
        runner.run(part)
    assert [result.outcome for result in runner.results] == [
        "failed: exit code 1", "stopped at its limit of 2 s", "killed: did not end 0 s after its limit of 2 s", "done",
    ]  # fmt: skip
    summary = (out / "summary.md").read_text()
    assert "| fails | failed: exit code 1 |" in summary and "| prints | done |" in summary
    assert "## fails\n\n```text\nso far\n```" in summary and "what it has" in summary
    assert "## prints\n\n| a | b |" in summary and "a message" not in summary
    assert "a planted failure" in (out / "fails.log").read_text()
    assert "a message" in (out / "prints.log").read_text()
    wait_until(lambda: not is_alive(pid_file.read_text()))
    assert sorted(path.name for path in out.iterdir()) == [
        "fails.log", "prints.log", "reports.log", "stays.log", "summary.md",
    ]  # fmt: skip


@pytest.mark.parametrize("seconds", [1.3, 1.71])
def test_a_killed_call_has_what_its_part_had_printed(tmp_path, seconds):
    counts = "import time\nfor row in range(999): print(f'| {row} |', flush=True); time.sleep(0.02)"
    program = f"from gpu_calls import *\nRunner(Path('.'), 'A call').run(Part('counts', ('-c', {counts!r}), 60, 1))"
    call = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(ROOT / "benchmarks")})
    time.sleep(seconds)
    call.kill()
    call.wait()
    rows = (tmp_path / "summary.md").read_text().partition("## counts\n\n")[2].split("\n")[:-1]
    assert len(rows) > 5 and rows == [f"| {row} |" for row in range(len(rows))]
    assert (tmp_path / "counts.log").read_text().count(" |\n") - len(rows) in (0, 1)


def test_a_part_that_does_not_fit_is_not_started(tmp_path):
    runner = Runner(tmp_path, "A call", minutes=(GRACE_SECONDS + 30) / 60)
    late = runner.run(Part("late", ("-c", "raise SystemExit('it was started')"), 200, 60))
    assert late.outcome in ("skipped: needs 60 s, 30 s left", "skipped: needs 60 s, 29 s left") and not late.is_good
    assert "| late | skipped: needs 60 s" in (tmp_path / "summary.md").read_text()
    assert not (tmp_path / "late.log").exists()


def test_a_part_is_given_what_is_left_and_the_last_one_all_of_it(tmp_path):
    runner = Runner(tmp_path, "A call")
    shows = ("-c", "import sys; print(sys.argv[1])", "{seconds}")
    for number, (seconds, is_last) in enumerate([(50, False), (900, False), (50, True)]):
        runner.run(Part(f"part-{number}", shows, seconds, 1), is_last)
    first, capped, last = (int(result.printed[0]) + GRACE_SECONDS for result in runner.results)
    whole = 60 * MINUTES - GRACE_SECONDS
    assert first == 50 and 0.8 * whole < capped <= whole and 0.8 * whole < last <= whole


def test_a_part_is_not_started_without_its_packages(tmp_path):
    runner = Runner(tmp_path, "A call", missing=frozenset({"peft"}))
    skipped = runner.run(Part("adapters", ("-c", ""), 9, 1, needs=("torch", "peft")))
    assert skipped.outcome == "skipped: needs peft, see preflight" and not skipped.is_good
    assert runner.run(Part("plain", ("-c", ""), 60, 1, needs=("torch",))).is_good


def test_a_missing_package_is_named_with_its_wheel(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "half_there.py").write_text("import not_there_at_all")
    assert describe_package("not_there_at_all") == (
        "| not_there_at_all | missing; carry the wheel of not_there_at_all |", False,
    )  # fmt: skip
    line, is_there = describe_package("half_there")
    assert "cannot be imported (No module named 'not_there_at_all'); carry the wheel of half_there" in line
    assert not is_there
    assert describe_package("pytest") == (f"| pytest | {pytest.__version__} |", True)


def test_a_row_that_fails_or_does_not_fit_stops_no_other_one(capsys, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("measuring.time.monotonic", lambda: now[0])

    def measure(name):
        now[0] += {"slow": 65.0}.get(name, 10.0)
        if name == "fails":
            raise RuntimeError("out of memory\nand more")
        if name == "absent":
            raise NotHere("torchao is not installed")
        print(f"measured {name}")

    assert not measure_rows(["first", "fails", "absent", "slow", "last"], 100, measure)
    out = capsys.readouterr().out
    assert "measured first" in out and "measured slow" in out and "measured last" not in out
    assert "- fails: failed, out of memory\n" in out and "- absent: not measured, torchao is not installed\n" in out
    assert "- last: skipped, 5 s were left and another row took 65 s\n" in out
    assert measure_rows(["first", "absent"], 100, measure)


def test_the_reason_of_a_failed_side_is_its_exception():
    traced = (
        "Traceback (most recent call last):\n  File x\n[rank0]: torch.OutOfMemoryError: CUDA out of memory\n\nSet A=1"
    )
    assert find_error(traced) == "[rank0]: torch.OutOfMemoryError: CUDA out of memory"
    assert find_error("Killed") == "Killed"


def test_a_side_starts_when_the_one_before_it_has_run(tmp_path):
    """Two sides that load and compile at once would not fit into the memory of one GPU."""
    program = """
import sys
with open(sys.argv[1], "a", buffering=1) as story:
    print(sys.argv[2], "starts", file=story)
    for line in sys.stdin:
        print(sys.argv[2], "runs", file=story)
        print("{}", flush=True)
"""
    story = tmp_path / "story"
    sides = [Side(name, ["-c", program, story, name], tmp_path / f"{name}.log") for name in ("first", "second")]
    take_turns(sides, rounds=1)
    assert story.read_text().splitlines() == [
        "second starts", "second runs", "first starts", "first runs", "first runs", "second runs",
    ]  # fmt: skip


def test_the_summary_names_the_commit_of_a_copy_without_git(tmp_path, monkeypatch):
    monkeypatch.delenv("ECHELON_COMMIT", raising=False)
    copy = tmp_path / "copy"
    copy.mkdir()
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", "-C", str(tmp_path), *names, "commit", "-q", "--allow-empty", "-m", "x"], check=True)
    assert describe_source(copy) == "no commit known"
    assert describe_source(tmp_path).startswith("commit ")
    (copy / "COMMIT").write_text("0123abc-dirty\n")
    assert describe_source(copy) == "commit 0123abc-dirty"
    monkeypatch.setenv("ECHELON_COMMIT", "4567def")
    assert describe_source(copy) == describe_source(tmp_path) == "commit 4567def"


def test_what_a_gpu_runs_has_the_settings_of_echelons_workers(monkeypatch):
    """Also the tests that need a GPU, whoever starts them: they are set when torch is imported."""
    for name in (*torch_environment(1), "PYTORCH_CUDA_ALLOC_CONF", "TORCHINDUCTOR_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    settings = torch_environment(1)
    assert settings["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert settings.items() <= build_environment().items()
    # Compiled kernels stay where the next call finds them.
    assert "TORCHINDUCTOR_CACHE_DIR" not in build_environment()
    program = """
import json, os, sys
class Shows:
    def find_spec(self, name, *_):
        if name == "torch":
            print(json.dumps(dict(os.environ)), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Shows())
import tests.gpu.conftest
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert settings.items() <= json.loads(done.stdout).items()


def test_the_rows_that_were_asked_for_come_first():
    """A call may end before the last ones."""
    assert next(iter(pretraining.TABLES["peers"])) == "torchtitan"
    assert list(pretraining.TABLES["variants"])[:4] == [
        "as the planner chooses", "zero1, micro batch 4", "zero2, micro batch 4", "FlashAttention-2",
    ]  # fmt: skip


def test_carried_wheels_are_the_versions_that_the_tests_have_run_with():
    lines = (ROOT / "benchmarks" / "wheels.txt").read_text(encoding="utf-8").splitlines()
    wheels = [Requirement(line) for line in lines if not line.startswith("#")]
    tested = constraints.read_constraints(constraints.FILE.read_text(encoding="utf-8"))
    both = {str(wheel): tested[name] for wheel in wheels if (name := canonicalize_name(wheel.name)) in tested}
    assert len(both) >= 10
    assert [wheel for wheel, version in both.items() if version not in Requirement(wheel).specifier] == []


@pytest.mark.parametrize("number", CALLS)
def test_a_call_fits_its_minutes_and_its_files(number):
    parts = CALLS[number].parts
    planned = INSTALL_SECONDS + PREFLIGHT_SECONDS + sum(part.seconds for part in parts) + GRACE_SECONDS
    assert planned <= 60 * MINUTES
    assert all(part.least <= part.seconds for part in parts)
    names = ["summary.md", "wheels.log", "preflight.log", *(f"{part.name}.log" for part in parts)]
    assert len(set(names)) == len(names) <= MAX_FILES


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTT", "matrix products"),
        (
            "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>",
            "matrix products",
        ),
        ("triton_tem_fused_mm_4", "matrix products"),
        ("aten::mm", "matrix products"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<...>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128", "attention"),
        ("triton_tem_fused_flex_attention_backward_1", "attention"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "fused (Triton)"),
        (
            "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>",
            "optimizer, clipping",
        ),
        ("Memcpy DtoD (Device -> Device)", "copies, fills"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>", "copies, fills"),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", "communication"),
        ("void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl<mul>>", "other"),
    ],
)
def test_the_kind_of_a_kernel_is_found_by_its_name(name, kind):
    assert find_kind(name) == kind


@pytest.mark.slow
def test_kernels_of_a_block_are_timed():
    """The profile finds the two products of a block, which take most of its time."""
    left = torch.randn(512, 512)
    kernels = Kernels()
    kernels.start()
    for _ in range(2):
        left = left @ left
    found = kernels.stop()
    name, seconds, calls = found[0]
    assert (name, calls) == ("aten::mm", 2) and seconds > 0
    table = render_kernels(found, num_steps=2)
    assert "| `aten::mm` | matrix products | 1.0 |" in table and "| matrix products |" in table


@pytest.mark.slow
def test_graphs_breaks_and_recompilations_are_counted():
    """In a process of its own, because Dynamo's counters are those of a process."""
    program = """
import torch
from kernel_table import Kernels, find_kind, render_kernels
from measuring import count_graphs
assert count_graphs() == (0, 0, 0)

@torch.compile(backend="eager", dynamic=False)
def double(values):
    torch._dynamo.graph_break()
    return 2 * values

double(torch.ones(3)), double(torch.ones(3)), double(torch.ones(4))
print(*count_graphs())
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    graphs, breaks, recompiled = map(int, done.stdout.split())
    assert graphs == 2 and breaks >= 1 and recompiled >= 1


def run_script(*arguments):
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    command = [str(ROOT / "benchmarks" / "gpu.sh"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_wrong_options_are_refused(tmp_path):
    for arguments, reason in {
        ("9", tmp_path): "invalid choice",
        ("2", tmp_path, "--only", "small"): "call 2 has the parts peers, variants",
        ("1", tmp_path, "--wheels", tmp_path): "there are no wheels",
    }.items():
        done = run_script(*arguments)
        assert done.returncode == 2 and reason in done.stderr


@pytest.mark.parametrize(("gpus", "numbers"), [(1, "01234568"), (2, "012345687"), (4, "012345687")])
def test_make_gpu_runs_every_call_that_the_gpus_allow(tmp_path, gpus, numbers):
    """Also after one that fails. Python is a program that says how many GPUs there are, and fails in call 3."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nif [ "$1" = -c ]; then echo {gpus}; exit; fi\necho "$2 $3" >> {tmp_path}/calls\n[ $2 != 3 ]\n'
    )
    python.chmod(0o755)
    command = ["make", "gpu", f"BIN={tmp_path}", "--old-file=.venv/.installed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "gpu] Error 1" in done.stderr
    assert (tmp_path / "calls").read_text().splitlines() == [f"{number} runs/gpu/call-{number}" for number in numbers]
    assert ("\n== without call 7" in done.stdout) == (gpus == 1)


@pytest.mark.slow
def test_the_tests_of_a_gpu_do_not_fail_without_bitsandbytes(tmp_path):
    """A bare machine lacks it: the cases of QLoRA are skipped."""
    (tmp_path / "without.py").write_text(
        "import importlib.util\nfind = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *given: None if name == 'bitsandbytes' else find(name, *given)\n"
    )
    command = ["-m", "pytest", "tests/gpu/test_gpu_parity.py", "-m", "gpu", "--on-cpu", "-k", "4_bit", "-p", "without"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(
        [sys.executable, *command, "-p", "no:cacheprovider", "-rs"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "bitsandbytes is not installed" in done.stdout
    assert "failed" not in done.stdout and "passed" not in done.stdout


@pytest.mark.slow
def test_pytest_reports_at_its_time_limit_what_its_workers_have_done(tmp_path):
    (tmp_path / "test_planted.py").write_text(
        "import time\ndef test_done(): print('x')\ndef test_hangs(): time.sleep(600)\n"
    )
    (tmp_path / "out").mkdir()
    runner = Runner(tmp_path / "out", "A call")
    command = ("-m", "pytest", "-n", "2", "-rA", "-p", "no:cacheprovider", "-c", "/dev/null", str(tmp_path))
    assert runner.run(Part("tests", command, 30, 1, is_table=False)).outcome == "stopped at its limit of 30 s"
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert "KeyboardInterrupt" in summary and "1 passed" in summary


TITAN = "torchtitan: not " if find_spec("torchtitan") is None else "| torchtitan | torchtitan |"
TABLES = {
    0: ["| as the planner chooses | echelon |", "| kind of work |", "| HF Trainer | HF Trainer |", "| qlora-bf16 |",
        "16 answers", *(f"| {row} |" for row in nccl_on_one_gpu.ROWS)],
    1: [" passed", "skipped in"],
    2: ["| HF Trainer | echelon |", "| HF Trainer | HF Trainer |", "| plain loop | plain loop |", TITAN,
        "| as the planner chooses | echelon |", "| zero2, micro batch 4 | echelon", "| kind of work |",
        "flex attention: not measured, it needs a GPU"],
    3: ["| lora-bf16 |", "| qlora-bf16 |", "| lora-bf16-examples |", "| qlora-8b |", "lora-8b-unsloth: not measured"],
    4: ["| echelon, bf16 | echelon |", "| 8,192 tokens | HF Trainer |", "| 32,768 tokens, selective | echelon",
        "| 2,048 tokens | echelon, data.document_mask=true |", "plain loop, torchao",
        "echelon, fp8: not measured, refused"],
    5: ["| selective, by operator |", "| memory budget 0.5 |", "offloading: not measured, it needs a GPU",
        "| tp 2, sequence parallel |", "| cp 2, ulysses |", "| pp 2, zero_bubble |", "| dp_shard 2, ep 2 |",
        "| tp 2 x pp 2 |"],
    6: ["2 passed", "ratio "],
    7: [f"| {side} |" for side in ("quorum", "alone", "replace-ddp", "replace-fsdp")],
    8: [*ghosts.ROWS, "| echelon, zero2 | 8 |", *(f"| {row} |" for row in nccl_on_one_gpu.ROWS)],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("number", CALLS)
def test_a_call_measures_everything_on_a_cpu(tmp_path, number):
    done = run_script(number, tmp_path / "out", "--size", "tiny", "--minutes", "60")
    summary = (tmp_path / "out" / "summary.md").read_text()
    assert done.returncode == 0, summary + done.stderr
    assert summary in done.stdout
    for part in CALLS[number].parts:
        assert f"| {part.name} | done |" in summary
    assert all(words in summary for words in TABLES[number]), summary
    assert "TFLOP/s" in summary and "GB/s" in summary and "| torch |" in summary
    assert ": failed" not in summary and "nan" not in summary
    files = list((tmp_path / "out").rglob("*"))
    assert all(path.is_file() for path in files) and len(files) <= MAX_FILES
