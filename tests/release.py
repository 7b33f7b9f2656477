"""`make release`: checks that this source can be released, builds it, tries the wheel, and tags the commit.

RELEASE.md has the steps. `--dry-run` does all but the tag, also if something is missing, and lists what is missing.
`--wheel` (`make wheel`) only builds and tries. Nothing is uploaded: the command for that is printed.
"""

import argparse
import ast
import datetime
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
PACKAGE = "src/echelon"
RECIPE = "recipes/pretrain-1.3b.yaml"  # what the wheel must be able to plan
ADDED = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}  # to a wheel
LEARNT = 4.8  # a held-out loss of the demo; its training begins at 7.7
BESIDES = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "constraints.txt", RECIPE}  # in the source


def run(*argv: str | Path, folder: Path = ROOT, **variables: str) -> str:
    """The output of a command, without echelon's source on its path. Raises SystemExit with the output if it fails.

    `variables` are added to its environment.
    """
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    done = subprocess.run(argv, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, argv))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def read_version() -> str:
    """`echelon.__version__`, the only place of the version."""
    for node in ast.parse((ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=str(version))):
                return version
    sys.exit(f"{PACKAGE}/__init__.py has no line like __version__ = '0.1.0'")


def check_git(version: str) -> Iterator[str]:
    branch = run("git", "branch", "--show-current").strip()
    if branch != "main":
        yield f"the branch is {branch or 'none'}, and releases are made from main: git switch main"
    if changed := run("git", "status", "--porcelain").splitlines():
        yield f"{len(changed)} files are changed or unknown to git; commit or remove them: {', '.join(changed[:5])}"
    if run("git", "tag", "--list", f"v{version}"):
        yield f"the tag v{version} exists; a new version needs another {PACKAGE}/__init__.py: __version__"


def check_version(version: str) -> Iterator[str]:
    if not re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version):
        yield f"__version__ = {version!r} is no release; write it like 0.1.0 or 0.1.0rc1"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if "version" in project:
        yield "pyproject.toml has a version of its own; remove it, and keep dynamic = ['version']"
    if re.search(r"^version:", (ROOT / "CITATION.cff").read_text(encoding="utf-8"), re.MULTILINE):
        yield "CITATION.cff has a version of its own; remove it"


def check_changelog(version: str, today: datetime.date) -> Iterator[str]:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    heading = re.search(rf"^## \[{re.escape(version)}\] - (\S+)$", text, re.MULTILINE)
    if heading is None:
        yield f"CHANGELOG.md has no heading '## [{version}] - {today}'; give [Unreleased] this name"
        return
    try:
        if datetime.date.fromisoformat(heading[1]) > today:
            yield f"CHANGELOG.md dates {version} {heading[1]}, which is after today, {today}"
    except ValueError:
        yield f"CHANGELOG.md dates {version} {heading[1]!r}; write the date like {today}"


def check_tests() -> Iterator[str]:
    """All suites of `make check` must have passed with this source."""
    argv = [sys.executable, "-m", "tests.check", "--table"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        yield f"not all tests have passed with this source; run make check:\n{(done.stdout + done.stderr).strip()}"


def build(version: str) -> tuple[Path, Path]:
    """Build the source distribution, and the wheel from it; return both. Raises SystemExit if their text is wrong."""
    for old in DIST.glob("echelon-*"):
        old.unlink()
    run(sys.executable, "-m", "build", "--outdir", DIST)
    wheel, source = DIST / f"echelon-{version}-py3-none-any.whl", DIST / f"echelon-{version}.tar.gz"
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, source)
    return wheel, source


def check_content(wheel: Path, source: Path, version: str) -> Iterator[str]:
    """The wheel has exactly the package's files that git knows; the source distribution has them and some others."""
    tracked = set(run("git", "ls-files", PACKAGE).splitlines())
    expected = {name.removeprefix("src/") for name in tracked} | {f"echelon-{version}.dist-info/{x}" for x in ADDED}
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    with tarfile.open(source) as archive:
        shipped = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    for what, names in {
        "the wheel lacks": expected - packed,
        "the wheel has, and git does not know": packed - expected,
        "the source distribution lacks": (tracked | BESIDES) - shipped,
    }.items():
        if names:
            yield f"{what} {', '.join(sorted(names)[:5])}"


def try_wheel(wheel: Path, version: str) -> Iterator[str]:
    """Install the wheel in an empty environment, with the tested versions, and run three commands."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder) / "bin"
        run(programs / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, folder=Path(folder))
        printed = run(programs / "echelon", "--version", folder=Path(folder)).strip()
        if printed != f"echelon {version}":
            yield f"echelon --version prints {printed!r} instead of 'echelon {version}'"
        plan = run(programs / "echelon", "plan", ROOT / RECIPE, "--devices", "8xH100", folder=Path(folder))
        if "8 x H100" not in plan:
            yield f"echelon plan {RECIPE} --devices 8xH100 prints no plan for 8 x H100: {plan[:300]}"
        yield from try_demo(programs, Path(folder))


def try_demo(programs: Path, folder: Path) -> Iterator[str]:
    """Run the demo with no other programs on the path than these: without make, git and a compiler."""
    printed = run(programs / "echelon", "demo", folder=folder, PATH=str(programs))
    losses = [float(loss) for loss in re.findall(r"^eval at step \d+: loss (\S+)", printed, re.MULTILINE)]
    if len(losses) < 3 or losses != sorted(losses, reverse=True) or losses[-1] > LEARNT:
        yield f"the held-out losses of echelon demo are {losses}; they should fall, to at most {LEARNT}"
    sample = printed.partition("== letting it continue ")[2].partition("\n")[2].partition("\n== ")[0]
    if len(re.findall(r"\b(?:self|def|return|if|for|in|not|None|True|False)\b", sample)) < 8:
        yield f"the sample of echelon demo does not read like Python: {sample!r}"
    last = printed.strip().rpartition("\n")[2]
    if not last.startswith("next"):
        yield f"echelon demo does not end with what to do next: {last}"


def report(title: str, faults: Iterable[str]) -> list[str]:
    found = list(faults)
    print(f"{'MISSING' if found else 'ok':<8} {title}", *found, sep="\n         ", flush=True)
    return found


def main(arguments: Iterable[str] | None = None) -> int:
    """Return 0 if the version is released, or could be; 1 if something is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__.partition("\n")[0])
    parser.add_argument("--dry-run", action="store_true", help="do all but the tag, and list what is missing")
    parser.add_argument("--wheel", action="store_true", help="only build the wheel and try it")
    parser.add_argument("--tag", help="refuse if it is not that of this version")
    options = parser.parse_args(arguments if arguments is None else list(arguments))
    version = read_version()
    tag = f"v{version}"
    if options.tag not in (None, tag):
        parser.error(f"--tag {options.tag} is not that of __version__ = {version!r}: {tag}")
    missing = []
    if not options.wheel:
        missing += report("main is clean", check_git(version))
        missing += report(f"the version {version}, in one place", check_version(version))
        missing += report("the changelog", check_changelog(version, datetime.date.today()))
        missing += report("all tests", check_tests())
        if missing and not options.dry_run:
            print("nothing was built or tagged")
            return 1
    wheel, source = build(version)
    missing += report(f"built {wheel.name} and {source.name}", check_content(wheel, source, version))
    missing += report("the wheel, in an empty environment", try_wheel(wheel, version))
    if missing or options.dry_run or options.wheel:
        print(f"nothing was tagged; {len(missing) or 'nothing'} missing")
        return 1 if missing else 0
    run("git", "tag", "--annotate", "--message", f"echelon {version}", tag)
    print(f"tagged {tag}. Nothing was uploaded. To publish it:")
    print(f"git push origin {tag}")
    print(f"{sys.executable} -m twine upload {wheel.relative_to(ROOT)} {source.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
