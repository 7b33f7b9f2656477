"""Commands on a trained model: `echelon eval`, its loss or its scores in tasks; `export`, an HF folder; and `generate`,
which samples from it, or talks to it on a terminal or by messages from a pipe."""

import json
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from itertools import islice
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echelon.cli.commands.arguments import (
    JsonOption,
    RunArgument,
    ShardsOption,
    TargetArgument,
    parse_nproc,
    run_with_model,
)
from echelon.cli.commands.options import OptionsOf
from echelon.cli.commands.terminal import complain, log_to_stderr, show, show_made, show_piece
from echelon.ground.errors import ConfigError
from echelon.ground.stored import MAX_ROWS_BYTES, read_text

if TYPE_CHECKING:
    from echelon.learn.answers.sampling import Sampling
    from echelon.learn.distributed.runtime import Runtime as Team
    from echelon.tools.inference.generate import Dialogue, Sample

# Characters of a prompt in the header of its samples.
_HEADER_WIDTH = 60
HELP = (
    "/reset forgets the conversation, /system TEXT also sets the system message, /quit or Ctrl-D ends; "
    "Ctrl-C stops an answer."
)


def evaluate(
    target: TargetArgument,
    *,
    nproc: ShardsOption = "auto",
    as_json: JsonOption = False,
    **options: Annotated[Any, OptionsOf(["models:evaluate"], without=["team"])],
) -> None:
    """Evaluate a run or a model on held-out text or on tasks. Shows loss and perplexity, or accuracy."""
    from echelon.cli.api.models import check_target, check_texts, find_target
    from echelon.cli.api.models import evaluate as evaluate_target

    log_to_stderr()
    num_processes = parse_nproc(nproc)
    check_target(target, options.get("checkpoint"))
    check_texts(options.get("data"), options.get("tasks"))
    find_target(target, options.get("checkpoint"))

    def work(team: "Team | None") -> None:
        result = evaluate_target(target, team=team, **options)
        for line in [json.dumps(result, default=str)] if as_json else render_lines(result):
            show(line)

    run_with_model(target, num_processes, work)


def render_lines(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    """A line for each value; nested mappings are indented. A single set is left out, as it equals the total."""
    from echelon.run.report.judgement import describe_context

    for key, value in values.items():
        if isinstance(value, dict):
            if key != "sets" or len(value) > 1:
                yield f"{indent}{key}:"
                yield from render_lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_render_value(value)}"
            if key == "unigram_entropy" and None not in (value, values["loss"]):
                yield f"{indent}{describe_context(values['loss'], value)}"


def _render_value(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "unknown" if value is None else str(value)


def export(
    run: RunArgument,
    out: Annotated[Path | None, typer.Argument(metavar="[OUT]")] = None,
    *,
    nproc: ShardsOption = "auto",
    **options: Annotated[Any, OptionsOf(["models:export"])],
) -> None:
    """Write a checkpoint as an HF folder. Contains model, config and tokenizer; or the adapter, if it has one.

    Args:
        out: the HF folder to write. With `--push` it may be left out.
    """
    from echelon.cli.api.models import export as export_folder
    from echelon.ground.launch_environment import find_host_dir

    num_processes = parse_nproc(nproc)
    if find_host_dir() is not None:  # a process that `compare_in_ranks` started
        from echelon.tools.inference.merge import compare_merged
        from echelon.tools.inference.ranks import run_as_rank

        folder = out
        assert folder is not None
        run_as_rank(lambda team: compare_merged(run, folder, options["checkpoint"], team))
    export_folder(run, out, nproc=num_processes, **options)


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
    from echelon.tools.inference.generate import Chat, generate_samples

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
    if path is not None and prompt is None:
        return read_prompts(path)
    if path is None and prompt is not None:
        return [{"prompt": prompt}]
    if as_chat and path is None:
        return []
    raise ConfigError("generate needs one of --prompt TEXT and --prompts FILE; give one.")


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """The prompts of a file: the non-empty lines of a .txt, or .jsonl records with a `prompt` field."""
    if path.suffix not in (".txt", ".jsonl"):
        raise ConfigError(f"--prompts {path}: give a .txt with one prompt per line, or a .jsonl with a `prompt` field.")
    try:
        lines = read_text(path, MAX_ROWS_BYTES).split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path} cannot be read: {error}; give a text file in UTF-8.") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            records.append({"prompt": line} if path.suffix == ".txt" else _parse_record(path, number, line))
    if not records:
        raise ConfigError(f"--prompts {path} contains no prompt; give at least one line.")
    return records


def _parse_record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"--prompts {path}, line {number} is not JSON: {error}; correct that line.") from error
    if not isinstance(record, dict) or not isinstance(record.get("prompt"), str):
        raise ConfigError(f'--prompts {path}, line {number} has no string `prompt`; write {{"prompt": "..."}}.')
    return record


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


def converse(target: Path, sampling: "Sampling", system: str | None, checkpoint: str | None, as_json: bool) -> None:
    """Answer messages from a terminal, or from a pipe or file as stdin, until they end.

    Raises ConfigError if the model has no chat template, and on a pipe for a message that cannot be answered.
    """
    from echelon.tools.inference.generate import Dialogue

    dialogue = Dialogue(target, sampling, system, checkpoint)
    if not as_json and sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty():
        _talk(dialogue)
    else:
        _answer_lines(dialogue, as_json)


def _talk(dialogue: "Dialogue") -> None:
    """Answer the messages typed on a terminal, token by token, until /quit, Ctrl-D, or Ctrl-C between two answers."""
    show(HELP)
    for message in _messages(_typed_lines()):
        try:
            if not _obey(dialogue, message):
                dialogue.ask(message, show_piece)
                show("")
        except KeyboardInterrupt:
            show("")
        except ConfigError as error:
            complain(str(error))


def _answer_lines(dialogue: "Dialogue", as_json: bool) -> None:
    """Answer each line of stdin by one line: JSON, or the text with line breaks as `\\n`.

    Raises ConfigError for a message that cannot be answered, an unknown command, or no message at all.
    """
    from echelon.tools.inference.generate import render_sample

    is_empty = True
    for message in _messages(_piped_lines()):
        is_empty = False
        if not _obey(dialogue, message):
            answer = dialogue.ask(message)
            show_made(render_sample({"prompt": message}, answer) if as_json else answer.text.replace("\n", "\\n"))
    if is_empty:
        raise ConfigError("--chat: stdin contains no message; write one per line, or give --prompt or --prompts.")


def _typed_lines() -> Iterator[str]:
    """Yield the lines typed on the terminal until Ctrl-D or Ctrl-C."""
    with suppress(ImportError):
        import readline  # noqa: F401  input() then edits lines and recalls earlier ones
    while True:
        try:
            line = input("> ")
        except (EOFError, KeyboardInterrupt):
            show("")
            return
        except UnicodeDecodeError as error:
            complain(f"{error}; write UTF-8.")
            continue
        yield line


def _piped_lines() -> Iterator[str]:
    try:
        yield from sys.stdin or ()
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat: stdin cannot be read: {error}; write UTF-8.") from error


def _messages(lines: Iterator[str]) -> Iterator[str]:
    """Yield the lines that are not empty, until /quit."""
    for line in lines:
        if line.strip() == "/quit":
            return
        if line.strip():
            yield line.rstrip("\n")


def _obey(dialogue: "Dialogue", line: str) -> bool:
    """Execute a line that is a command, such as `/reset`; return whether it was one. Raises ConfigError."""
    if (words := re.fullmatch(r"\s*(/[a-z]+)(?:\s+(.*?))?\s*", line)) is None:
        return False
    match words[1], words[2]:
        case "/reset", None:
            dialogue.reset()
        case "/system", str(text):
            dialogue.reset(text)
        case _:
            raise ConfigError(f"{line.strip()!r} is not a command. {HELP}")
    return True
