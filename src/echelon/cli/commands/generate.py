"""`echelon generate`: sample from a run or an HF folder, or talk to it."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.commands.arguments import JsonOption, ShardsOption, TargetArgument, parse_nproc
from echelon.cli.commands.interactive import converse
from echelon.cli.commands.options import OptionsOf
from echelon.cli.commands.sharded import run_with_model
from echelon.cli.commands.terminal import log_to_stderr, show, show_made, show_piece
from echelon.ground.errors import ConfigError

if TYPE_CHECKING:
    from echelon.learn.distributed.runtime import Runtime as Team
    from echelon.tools.inference.generate import Sample

# Characters of a prompt in the header of its samples.
_HEADER_WIDTH = 60


def generate(
    target: TargetArgument,
    *,
    prompt: str | None = None,
    prompts: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    stream: Annotated[bool | None, typer.Option("--stream/--no-stream")] = None,
    nproc: ShardsOption = "auto",
    out: Annotated[Path | None, typer.Option(metavar="FILE")] = None,
    as_json: JsonOption = False,
    **options: Annotated[Any, OptionsOf(["models:generate"])],
) -> None:
    """Sample from a run or an HF folder. With --chat and no prompt: talk to it.

    Args:
        prompt: the prompt to continue.
        prompts: file of prompts: .txt with one per line, or .jsonl.
        stream: print each token immediately. Default: only on a terminal.
        out: write JSON, one sample per line.
    """
    as_chat, system, checkpoint = (options.pop(name, None) for name in ("chat", "system", "checkpoint"))
    if system is not None and not as_chat:
        raise ConfigError(f"--system {system!r} requires --chat; add --chat, or remove --system.")
    from echelon.cli.api.models import find_target

    log_to_stderr()
    num_processes = parse_nproc(nproc)
    records = _read_records(prompt, prompts, bool(as_chat))
    find_target(target, checkpoint)
    from echelon.learn.answers.sampling import Sampling
    from echelon.tools.inference.chat import Chat
    from echelon.tools.inference.generate import generate_samples

    batch_size = options.pop("batch_size", 8)
    sampling = Sampling(**options | {"stop": tuple(options.get("stop", ()))})
    if not records:  # a conversation
        _check_conversation(out, sampling.num_samples, num_processes)
        return converse(target, sampling, system, checkpoint, as_json)
    texts, write = [record["prompt"] for record in records], None
    if as_json or out is not None:
        finish = partial(_write_samples, records=records, num_samples=sampling.num_samples, out=out)
    else:
        streams = sys.stdout.isatty() if stream is None else stream
        write = show_piece if streams else None
        finish = partial(_show_samples, headers=_headers(texts, sampling.num_samples), streams=streams)
    chat = Chat(system) if as_chat else None

    def work(team: "Team | None") -> None:
        finish(generate_samples(target, texts, sampling, checkpoint, batch_size, write, chat, team))

    return run_with_model(target, num_processes, work)


def _show_samples(samples: Iterator["Sample"], headers: Iterator[str], streams: bool) -> None:
    """Print each sample below its header; a sample that streams prints its own text as it is generated."""
    for header in headers:
        if header:
            show(header)
        sample = next(samples)
        show_made("" if streams else sample.text)


def _headers(prompts: Sequence[str], num_samples: int) -> Iterator[str]:
    """Yield the line above each sample; empty if there is only one, so that a script gets the bare text."""
    for number, prompt in enumerate(prompts, 1):
        start = shorten(prompt, _HEADER_WIDTH, placeholder="...")
        for sample in range(1, num_samples + 1):
            places = [f"prompt {number} of {len(prompts)}"] if len(prompts) > 1 else []
            places += [f"sample {sample} of {num_samples}"] if num_samples > 1 else []
            yield f"=== {', '.join(places)}: {start} ===" if places else ""


def _check_conversation(out: Path | None, num_samples: int, num_processes: int | None) -> None:
    """Refuse options that have no meaning in a conversation, which has one process."""
    for option, is_given in (
        (f"--out {out}", out is not None),
        (f"--num-samples {num_samples}", num_samples != 1),
        (f"--nproc {num_processes}", num_processes not in (None, 1)),
    ):
        if is_given:
            raise ConfigError(f"{option} requires --prompt or --prompts; add one, or remove {option.split()[0]}.")


def _read_records(prompt: str | None, path: Path | None, as_chat: bool) -> list[dict[str, Any]]:
    """The records of the prompts: one for `--prompt`, or those of a file; none for a conversation."""
    from echelon.tools.inference.prompts import read_prompts

    if path is not None and prompt is None:
        return read_prompts(path)
    if path is None and prompt is not None:
        return [{"prompt": prompt}]
    if as_chat and path is None:
        return []
    raise ConfigError("generate needs one of --prompt TEXT and --prompts FILE; give one.")


def _write_samples(
    samples: Iterator["Sample"], records: list[dict[str, Any]], num_samples: int, out: Path | None
) -> None:
    """Write each sample as a line of JSON as soon as it is ready, to `out` or stdout."""
    from echelon.ground.launch_environment import find_place
    from echelon.tools.inference.generate import render_sample

    file = out if find_place().rank == 0 else Path(os.devnull)
    with file.open("w", encoding="utf-8") if file is not None else nullcontext() as lines:
        for record in records:
            for sample in islice(samples, num_samples):
                line = render_sample(record, sample)
                if lines is None:
                    show(line)
                else:
                    lines.write(f"{line}\n")
                    lines.flush()
    if out is not None:
        show(f"generate: {len(records) * num_samples} samples in {out}")
