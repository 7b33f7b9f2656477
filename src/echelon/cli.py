"""The `echelon` command. Every import of substance is inside a command, so that `--help` answers at once."""

import json
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from echelon.commands import (
    OverridesArgument,
    RecipeArgument,
    complain,
    read_recipe,
    require_folder,
    say,
    stops_told,
)
from echelon.commands.checkpoint import app as checkpoint_app
from echelon.commands.data import data
from echelon.commands.doctor import doctor
from echelon.commands.drill import drill
from echelon.commands.import_recipe import import_file
from echelon.commands.launch import cancel, launch, logs, status
from echelon.commands.plan import plan
from echelon.commands.sweep import sweep
from echelon.commands.train import train
from echelon.errors import ConfigError, EchelonError, explain_storage_error, render_traceback

app = typer.Typer(
    name="echelon",
    help="Train language models across processes, GPUs and machines from one recipe.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(checkpoint_app, name="checkpoint")
app.command()(data)
app.command()(doctor)
app.command()(drill)
app.command()(plan)
app.command("import")(import_file)
for command in (train, launch, status, logs, cancel, sweep):
    app.command()(command)


@app.callback()
def begin(
    local_rank: Annotated[int | None, typer.Option("--local-rank", "--local_rank", hidden=True)] = None,
) -> None:
    """Take the argument that `python -m torch.distributed.launch` hands to each rank; LOCAL_RANK says the same."""


TargetArgument = Annotated[Path, typer.Argument(metavar="RUN_OR_MODEL", help="A run folder or an HF model folder.")]
CheckpointOption = Annotated[
    str | None, typer.Option("--checkpoint", metavar="newest|best|STEP", help="Of a run. Default: the newest.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")]


@app.command()
def prepare(recipe_path: RecipeArgument, overrides: OverridesArgument = None) -> None:
    """Read, tokenize and pack the data into shards; `train` does it when they are absent."""
    from echelon.data.prepare import prepare_data

    recipe = read_recipe(recipe_path, overrides)
    with stops_told():
        data = prepare_data(recipe, say)
    say(f"data: prepared in {data.path}")


@app.command("eval")
def evaluate(
    target: TargetArgument,
    data_path: Annotated[
        Path | None, typer.Option("--data", metavar="PATH", help="Other text than the run's held-out one.")
    ] = None,
    task: Annotated[
        Path | None, typer.Option("--tasks", metavar="FILE.jsonl", help="Multiple-choice questions to score instead.")
    ] = None,
    harness: Annotated[
        str | None, typer.Option("--lm-eval", metavar="TASK[,TASK]", help="Tasks of lm-eval to run instead.")
    ] = None,
    include_path: Annotated[
        Path | None, typer.Option("--include-path", metavar="FOLDER", help="Task files of your own, for --lm-eval.")
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Examples of each task, for --lm-eval.")] = None,
    checkpoint: CheckpointOption = None,
    as_json: JsonOption = False,
) -> None:
    """Loss, perplexity and bits per byte on held-out text; or accuracy on tasks."""
    require_folder(target)
    _fetch_base(target)
    if sum(each is not None for each in (data_path, task, harness)) > 1:
        raise ConfigError("--data, --tasks and --lm-eval are three evaluations; give one at a time.")
    if harness is None and (include_path is not None or limit is not None):
        raise ConfigError("--include-path and --limit go with --lm-eval TASK; add it, or leave them out.")
    if task is not None:
        from echelon.inference.tasks import evaluate_task

        result = evaluate_task(target, task, checkpoint)
    elif harness is not None:
        from echelon.inference.harness import evaluate_with_harness

        result = evaluate_with_harness(target, harness.split(","), include_path, limit, checkpoint)
    else:
        from echelon.inference.evaluate import evaluate_model

        result = evaluate_model(target, data_path, checkpoint)
    for line in [json.dumps(result, default=str)] if as_json else _render_lines(result):
        say(line)


@app.command()
def generate(
    target: TargetArgument,
    prompt: Annotated[str | None, typer.Option("--prompt", help="The text to go on from.")] = None,
    prompts_path: Annotated[
        Path | None, typer.Option("--prompts", metavar="FILE", help="Prompts: .txt, one a line, or .jsonl.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens to sample.")] = 128,
    temperature: Annotated[float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Sample among the k likeliest; 0: among all.")] = 50,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="Sample among the likeliest with this probability.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", min=0.0, max=1.0, help="Leave out tokens below this share of the likeliest.")
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option("--repetition-penalty", min=0.01, help="Above 1: tokens seen before become less likely.")
    ] = 1.0,
    num_samples: Annotated[int, typer.Option("--num-samples", min=1, help="Samples of each prompt.")] = 1,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are messages of a user; show the answers of the chat template.")
    ] = False,
    system: Annotated[
        str | None, typer.Option("--system", help="System message of --chat. Default: what the run was trained with.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends a sample; may be repeated.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the sampling.")] = 0,
    checkpoint: CheckpointOption = None,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Samples generated at a time.")] = 8,
    stream: Annotated[
        bool | None, typer.Option("--stream/--no-stream", help="Show each token at once. Default: on a terminal.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Write JSON, a sample a line.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Sample from a run or an HF folder."""
    require_folder(target)
    _fetch_base(target)
    from echelon.inference.chat import Chat
    from echelon.inference.generate import Sampling, generate_samples, read_prompts, render_sample

    if (prompt is None) == (prompts_path is None):
        raise ConfigError("generate needs one of --prompt TEXT and --prompts FILE; give one.")
    if system is not None and not as_chat:
        raise ConfigError(f"--system {system!r} goes with --chat; add it, or leave it out.")
    records: list[dict[str, Any]] = [{"prompt": prompt}] if prompts_path is None else read_prompts(prompts_path)
    sampling = Sampling(
        max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, num_samples, tuple(stop or ()), seed
    )
    plain = not as_json and out is None
    streams = plain and (sys.stdout.isatty() if stream is None else stream)
    write, chat = _write if streams else None, Chat(system) if as_chat else None
    samples = generate_samples(
        target, [each["prompt"] for each in records], sampling, checkpoint, batch_size, write, chat
    )
    with out.open("w", encoding="utf-8") if out is not None else nullcontext(sys.stdout) as lines:
        for index, sample in enumerate(samples):
            if plain:
                say("" if streams else sample.text)
            else:
                print(render_sample(records[index // num_samples], sample), file=lines, flush=True)
    if out is not None:
        say(f"generate: {len(records) * num_samples} samples in {out}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The HF folder to write.")],
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Of a whole model: fp32 (the default), bf16 or fp16.")
    ] = None,
    checkpoint: CheckpointOption = None,
    merge: Annotated[bool, typer.Option("--merge", help="Of a run that trained an adapter: the whole model.")] = False,
) -> None:
    """Write a checkpoint as an HF folder: safetensors, config, tokenizer; of a run with an adapter, the adapter."""
    require_folder(run)
    _fetch_base(run)
    from echelon.checkpoint.adapted import read_run_recipe
    from echelon.checkpoint.export import export_adapter, export_run
    from echelon.inference.merging import merge_run

    if merge:
        merge_run(run, out, dtype or "fp32", checkpoint, say)
    elif read_run_recipe(run).adapter.is_adapter:
        if dtype is not None:
            raise ConfigError(
                f"--dtype {dtype} is of a whole model, and an adapter is written as it was trained; add --merge, or "
                "leave it out."
            )
        num_bytes = export_adapter(run, out, checkpoint)
        say(f"export: {out} is ready for peft's PeftModel.from_pretrained, {num_bytes / 1e6:.2f} MB of weights")
        return
    else:
        export_run(run, out, dtype or "fp32", checkpoint)
    say(f"export: {out} is ready for transformers' from_pretrained")


@app.command()
def schema() -> None:
    """Print the recipe's JSON schema, for editors."""
    from echelon.recipe import recipe_json_schema

    say(json.dumps(recipe_json_schema(), indent=2))


@app.command()
def init(
    path: Annotated[Path, typer.Argument(metavar="[RECIPE]", help="The file to write.")] = Path("recipe.yaml"),
    params: Annotated[
        str | None, typer.Option("--params", metavar="1.3b", help="Parameters; the shape and the rest follow.")
    ] = None,
    tokens: Annotated[
        str | None, typer.Option("--tokens", metavar="50b", help="Tokens to train on. Default: 20 a parameter.")
    ] = None,
    vocab_size: Annotated[
        int | None, typer.Option("--vocab-size", min=257, help="Of the tokenizer, with --params or --tokens.")
    ] = None,
) -> None:
    """Write a recipe to start from: a small one, or one for a number of parameters and tokens."""
    from echelon.recipe import render_starter

    if path.exists():
        raise ConfigError(f"{path} exists; name another file, or remove it first.")
    if params is None and tokens is None:
        if vocab_size is not None:
            raise ConfigError(f"--vocab-size {vocab_size} goes with --params or --tokens; add one of them.")
        recipe, lines = render_starter(name=path.stem), list[str]()
    else:
        from echelon.recipe.scaling import parse_count, render_scaled, scale_recipe

        scaled = scale_recipe(
            None if params is None else parse_count("--params", params),
            None if tokens is None else parse_count("--tokens", tokens),
            vocab_size,
        )
        recipe, lines = render_scaled(scaled, path.stem, path.name), [*map(str, scaled.choices), *scaled.notes]
    path.write_text(recipe, encoding="utf-8")
    for line in lines:
        say(line)
    say(f"wrote {path}: set data.train to your text, then run: echelon train {path}")


def _fetch_base(target: Path) -> None:
    """Have what the run's frozen weights are read from; its lines go where no result is read from."""
    from echelon.checkpoint.adapted import fetch_base

    fetch_base(target, lambda line: typer.echo(line, err=True))


def _render_lines(values: dict[str, Any], indent: str = "") -> Iterator[str]:
    """A line for each value; a mapping's below its key. One set alone is the whole."""
    for key, value in values.items():
        if isinstance(value, dict):
            if key != "sets" or len(value) > 1:
                yield f"{indent}{key}:"
                yield from _render_lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {_render_value(value)}"


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def _render_value(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else "unknown" if value is None else str(value)


def main() -> None:
    """The console script: every error becomes one message and the exit code of the contract."""
    if sys.getfilesystemencoding() != "utf-8":  # libraries take no path with a letter that the locale has not
        from echelon.distributed.runtime import restart_in_utf8

        restart_in_utf8()
    try:
        app()
    except EchelonError as error:
        complain(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        complain("stopped by SIGINT")
        sys.exit(1)
    except Exception as error:
        if storage := explain_storage_error(error, Path.cwd()):
            complain(f"{storage}.")
            sys.exit(1)
        complain(f"{type(error).__name__}: {error}; this is a fault in echelon, its traceback follows")
        sys.stderr.write(render_traceback(error))
        sys.exit(1)
