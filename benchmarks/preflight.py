"""What a call on a machine with a GPU needs: packages, versions, and the measured ceilings of the device.

    python benchmarks/preflight.py [PACKAGE ...] [--json FILE]

Prints Markdown: each package with its version, or in plain words what is missing and which wheel to carry; then the
rates of a bf16 matrix product and of a copy. --json also writes the names of the packages that cannot be imported.
"""

import argparse
import contextlib
import importlib
import json
import subprocess
import traceback
from importlib import metadata
from pathlib import Path

# Module: what to carry as wheels if it is missing, beyond a wheel of the same name.
CARRIED = {
    "pydantic": "pydantic, exactly the pydantic_core that it names, annotated_types, typing_inspection and "
    "typing_extensions",
    "yaml": "PyYAML",
    "xdist": "pytest_xdist and execnet",
    "typer": "typer and shellingham",
    "rich": "rich, markdown_it_py, mdurl and pygments",
    "unsloth": "unsloth, unsloth_zoo and trl",
}


def describe_package(name):
    """(a line of the table, whether it can be imported)."""
    try:
        importlib.import_module(name)
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, ModuleNotFoundError) and error.name == name:
            reason = "missing"
        else:
            first = (str(error) or type(error).__name__).splitlines()[0]
            reason = f"cannot be imported ({first.replace('|', '/')})"
        return f"| {name} | {reason}; carry the wheel of {CARRIED.get(name, name)} |", False
    distributions = metadata.packages_distributions().get(name, [name])
    try:
        return f"| {name} | {metadata.version(distributions[0])} |", True
    except metadata.PackageNotFoundError:
        return f"| {name} | without a version |", True


def describe_device():
    """Lines about the device, its driver and its ceilings."""
    import torch

    from measuring import describe_machine, measure_copy, measure_matmul

    yield f"{describe_machine('torch', 'transformers')}, CUDA {torch.version.cuda}"
    if torch.cuda.is_available():
        asked = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total,power.limit", "--format=csv,noheader"]
        with contextlib.suppress(OSError):  # it may not be on the path
            said = subprocess.run(asked, capture_output=True, text=True, check=False)
            yield f"- nvidia-smi: {(said.stdout or said.stderr).strip()}"
        yield f"- device memory: {torch.cuda.mem_get_info()[1] / 1e9:.1f} GB"
    yield f"- a bf16 matrix product of random numbers: {measure_matmul() / 1e12:.3g} TFLOP/s"
    yield f"- a copy within the device's memory, bytes read and written: {measure_copy() / 1e9:.4g} GB/s"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="*", metavar="PACKAGE")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print("| package | version |\n|---|---|")
    missing = []
    for name in arguments.packages:
        line, is_there = describe_package(name)
        print(line, flush=True)
        if not is_there:
            missing.append(name)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(missing))
    print()
    for line in describe_device():
        print(line, flush=True)


if __name__ == "__main__":
    main()
