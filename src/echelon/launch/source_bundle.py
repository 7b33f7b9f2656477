"""What a job brings of echelon: its wheel, and the extras that its recipe needs."""

import base64
import hashlib
import io
import re
import zipfile
from functools import cache
from pathlib import Path

from echelon.ground.extras import EXTRAS
from echelon.ground.plugins import read_own
from echelon.recipe.document import Recipe
from echelon.recipe.names import ENGINES

PACKAGE = Path(__file__).parents[1]
DISTRIBUTION = "echelon"
TORCH = "torch>=2.11,<2.14"
# As in pyproject.toml, without torch: an image has the build that fits its drivers.
CORE = (
    "transformers>=5.17,<6", "tokenizers>=0.22", "jinja2>=3.1.6", "safetensors>=0.6", "numpy>=1.26",
    "pydantic>=2.12,<3", "pyyaml>=6", "fsspec>=2024.6", "typer>=0.26", "rich>=13",
)  # fmt: skip
HELPFUL = ("nvidia-ml-py>=12; sys_platform == 'linux'",)  # reads the load of GPUs
_EARLIEST = (1980, 1, 1, 0, 0, 0)


def list_extras(recipe: Recipe) -> dict[str, str]:
    """The extras of echelon without which the recipe cannot train, each with the key that needs it.

    An engine that pip cannot install has no row in EXTRAS.
    """
    extras: dict[str, str] = {name: f"track: {name}" for name in recipe.track}
    if ENGINES[recipe.engine].package is not None:
        extras[recipe.engine] = f"engine={recipe.engine}"
    if "fp8" in recipe.train.precision:
        extras["float8"] = "train.precision=fp8"
    if any(reward.name == "math" for reward in recipe.reward):
        extras["math"] = "reward=math"
    if recipe.evaluate.tasks:
        extras["lm-eval"] = "evaluate.tasks"
    if recipe.adapter.is_adapter:
        extras["qlora" if recipe.adapter.method == "qlora" else "peft"] = f"adapter.method={recipe.adapter.method}"
    if recipe.launch.sagemaker.secrets:
        extras["sagemaker"] = "launch.sagemaker.secrets"
    remote = recipe.checkpoint.remote or ""
    for scheme, extra in (("s3://", "s3"), ("gs://", "gcs")):
        if remote.startswith(scheme):
            extras[extra] = f"checkpoint.remote={remote}"
    return extras


@cache
def build_wheel() -> tuple[str, bytes]:
    """A wheel of this echelon's source: its file name and content. The same source gives the same wheel.

    Its build tag is a digest of the content, so no environment made of other source counts as one made of this.
    """
    files = {
        f"{PACKAGE.name}/{path.relative_to(PACKAGE).as_posix()}": path.read_bytes()
        for path in sorted(PACKAGE.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    version = re.findall(rb'__version__ = "(.*)"', files[f"{PACKAGE.name}/__init__.py"])[0].decode()
    info = f"{DISTRIBUTION}-{version}.dist-info"
    files[f"{info}/METADATA"] = _render_metadata(version).encode()
    files[f"{info}/WHEEL"] = b"Wheel-Version: 1.0\nGenerator: echelon\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    named = {group: [f"{name} = {entry}\n" for name, entry in rows.items()] for group, rows in read_own().items()}
    files[f"{info}/entry_points.txt"] = "".join(f"[{group}]\n{''.join(named[group])}" for group in named).encode()
    digests = {name: hashlib.sha256(content).digest() for name, content in files.items()}
    rows = [
        f"{name},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},{len(files[name])}\n"
        for name, digest in digests.items()
    ]
    files[f"{info}/RECORD"] = f"{''.join(rows)}{info}/RECORD,,\n".encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            member = zipfile.ZipInfo(name, _EARLIEST)
            member.compress_type, member.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
            archive.writestr(member, content)
    tag = hashlib.sha256(files[f"{info}/RECORD"]).hexdigest()[:12]
    return f"{DISTRIBUTION}-{version}-0x{tag}-py3-none-any.whl", buffer.getvalue()


def _render_metadata(version: str) -> str:
    lines = ["Metadata-Version: 2.1", f"Name: {DISTRIBUTION}", f"Version: {version}", "Requires-Python: >=3.11"]
    lines += [f"Requires-Dist: {requirement}" for requirement in (TORCH, *CORE, *HELPFUL)]
    for extra, requirements in EXTRAS.items():
        lines.append(f"Provides-Extra: {extra}")
        lines += [f"Requires-Dist: {requirement}; extra == '{extra}'" for requirement in requirements]
    return "\n".join(lines) + "\n"


def name_requirement(recipe: Recipe, folder: str) -> str:
    """The wheel in a folder of a machine, with the extras that the recipe needs, as pip's requirement."""
    extras = ",".join(sorted(extra for extra in list_extras(recipe) if extra in EXTRAS))
    return f"{folder}/{build_wheel()[0]}{extras and f'[{extras}]'}"
