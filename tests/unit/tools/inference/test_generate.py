"""Sampling: batches, limits, streams and stop strings, compared with transformers' generate and values by hand."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import echelon
from echelon.cli.commands.trained_models import read_prompts
from echelon.cli.main import main
from echelon.ground.errors import ConfigError
from echelon.learn.answers.sampling import Sampling, build_processors, draw_tokens
from echelon.learn.data.tokenizer import build_bytes_tokenizer, train_tokenizer
from echelon.tools.inference.generate import TextStream, generate_samples
from tests.families import small_config

TEXT = "The café serves naïve résumés, 東京 and 👍🏽 to all. " * 20
PROMPTS = ["The café", "a", "naïve résumés, 東京 and more"]


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    """An HF folder with a small random model and a byte-level BPE tokenizer that splits characters."""
    path = tmp_path_factory.mktemp(request.param)
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    fields = small_config(request.param, True) | {"vocab_size": 320}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    for parameter in model.parameters():  # far from uniform, so that greedy choices are not close to ties
        parameter.data.mul_(4)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    return path


def texts(folder, prompts, batch_size=8, **options):
    sampling = Sampling(**{"max_tokens": 12, "temperature": 0.0, **options})
    return [each.text for each in generate_samples(folder, prompts, sampling, batch_size=batch_size)]


def test_a_batch_equals_its_prompts_alone(folder):
    alone = [texts(folder, [prompt])[0] for prompt in PROMPTS]
    assert texts(folder, PROMPTS) == alone
    assert texts(folder, PROMPTS[::-1], batch_size=2) == alone[::-1]
    options = {"temperature": 0.9, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.3, "num_samples": 2}
    sampled = [text for prompt in PROMPTS for text in texts(folder, [prompt], **options)]
    assert texts(folder, PROMPTS, **options) == sampled
    assert len(set(sampled)) == 6
    assert texts(folder, PROMPTS, **options, seed=1) != sampled


def test_greedy_sampling_equals_transformers(folder):
    from transformers import AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    for penalty in (1.0, 1.5):
        for prompt in PROMPTS:
            inputs = tokenizer(prompt, return_tensors="pt")
            ids = model.generate(**inputs, max_new_tokens=12, do_sample=False, repetition_penalty=penalty)
            [text] = texts(folder, [prompt], repetition_penalty=penalty)
            assert text == tokenizer.decode(ids[0], skip_special_tokens=True)


def test_samples_beyond_the_learned_positions_are_refused(folder):
    if "gpt2" in folder.name:
        words = (
            r"--max-tokens 1024: with a prompt of 1 tokens .* the 1024 positions of the model; use --max-tokens 1023 or"
        )
        with pytest.raises(ConfigError, match=words):
            texts(folder, ["a"], max_tokens=1024)


def test_a_stream_has_whole_characters_and_the_same_text(folder):
    for options in ({}, {"temperature": 1.5, "top_k": 0, "num_samples": 2}):
        pieces = []
        sampling = Sampling(**{"max_tokens": 40, "temperature": 0.0, **options})
        streamed = list(generate_samples(folder, PROMPTS, sampling, write=pieces.append))
        assert "".join(pieces) == "".join(each.text for each in streamed)
        assert [each.text for each in streamed] == texts(folder, PROMPTS, max_tokens=40, **options)


def test_a_stream_delays_partial_characters_and_partial_stop_strings():
    pieces = []
    stream = TextStream(build_bytes_tokenizer().decode, ("\n\n", "END"), pieces.append)
    for byte in "é👍\nE!\nEND more".encode():
        stream.put(byte)
    stream.end()
    assert pieces == ["é", "👍", "\n", "E!", "\n"] and "".join(pieces) == "é👍\nE!\n"


def test_a_stop_string_ends_only_its_own_sample(folder):
    whole = texts(folder, PROMPTS, max_tokens=30)
    stop = next(each for each in whole[0][len(PROMPTS[0]) + 2 :] if each.isascii())
    samples = list(generate_samples(folder, PROMPTS, Sampling(max_tokens=30, temperature=0.0, stop=(stop,))))
    assert samples[0].ended_by == "stop"
    for sample, prompt, text in zip(samples, PROMPTS, whole, strict=True):
        continuation = text[len(prompt) :]
        assert sample.text == prompt + continuation.split(stop)[0]
        assert (sample.ended_by == "stop") == (stop in continuation)


def test_samples_follow_the_softmax_of_the_allowed_tokens():
    rows = torch.tensor([2.0, 1.0, 0.0, -1.0, -9.0]).repeat(20000, 1)
    sampling = Sampling(temperature=0.5, top_k=4, top_p=0.99)
    scores = build_processors(sampling)(torch.zeros(20000, 1, dtype=torch.long), rows)
    draws = draw_tokens(scores, torch.arange(20000), torch.zeros(20000, dtype=torch.long))
    shares = torch.bincount(draws, minlength=5) / 20000
    # exp(2 * logit): 54.60, 7.389, 1, 0.1353 of 63.12; the first three have 99.8 %, the first two 98.2 %.
    kept = torch.tensor([54.598, 7.389, 1.0, 0.0, 0.0])
    assert shares.tolist() == pytest.approx((kept / kept.sum()).tolist(), abs=0.01)


def test_files_of_prompts(tmp_path):
    (tmp_path / "a.txt").write_text("one\n\ntwo \n")
    assert read_prompts(tmp_path / "a.txt") == [{"prompt": "one"}, {"prompt": "two "}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x\ny", "id": 3}) + "\n")
    assert read_prompts(tmp_path / "a.jsonl") == [{"prompt": "x\ny", "id": 3}]
    for name, content, words in [
        ("b.jsonl", '{"prompt": "a"}\n{"text": 1}', "line 2 has no string `prompt`"),
        ("b.jsonl", "{", "line 1 is not JSON"), ("b.txt", "\n \n", "contains no prompt"), ("b.csv", "x", "give a .txt"),
    ]:  # fmt: skip
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match=words):
            read_prompts(tmp_path / name)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_prompts(tmp_path / "none.txt")


@pytest.mark.parametrize("options", [{"temperature": -0.1}, {"max_tokens": 0}, {"num_samples": 0}, {"top_k": -1}])
def test_invalid_sampling_options_are_refused(options):
    [(name, value)] = options.items()
    with pytest.raises(ConfigError, match=rf"^{name}={value} must be at least \d"):
        Sampling(**options)


def test_a_string_gives_a_string_and_a_list_gives_a_list(folder):
    options = {"max_tokens": 5, "temperature": 0.0}
    one = echelon.generate(folder, PROMPTS[0], **options)
    assert echelon.generate(folder, PROMPTS[:2], num_samples=2, **options)[:2] == [one, one]
    assert one.startswith(PROMPTS[0])
    stop = one[len(PROMPTS[0]) :][1:3]
    assert echelon.generate(folder, PROMPTS[0], stop=stop, **options) == one[: one.index(stop, len(PROMPTS[0]))]
    with pytest.raises(ConfigError, match=r"num_samples=2 requires a list of prompts; use prompts=\[prompt\]"):
        echelon.generate(folder, PROMPTS[0], num_samples=2)
    with pytest.raises(ConfigError, match=r"system='x' requires chat=True"):
        echelon.generate(folder, PROMPTS[0], system="x")


def test_several_samples_have_headers_and_a_single_one_is_bare_text(folder, tmp_path, capsys, monkeypatch):
    def shown(*options):
        options = (str(folder), *options, "--max-tokens", "3", "--temperature", "0")
        monkeypatch.setattr("sys.argv", ["echelon", "generate", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code
        return capsys.readouterr().out

    first, second = texts(folder, [(long := "The café serves naïve résumés, " * 3), "a"], max_tokens=3)
    (tmp_path / "prompts.txt").write_text(f"{long}\na\n", encoding="utf-8")
    assert shown("--prompt", "a") == f"{second}\n"
    assert shown("--prompt", "a", "--num-samples", "2") == (
        f"=== sample 1 of 2: a ===\n{second}\n=== sample 2 of 2: a ===\n{second}\n"
    )
    start = "The café serves naïve résumés, The café serves naïve..."
    every = f"=== prompt 1 of 2: {start} ===\n{first}\n=== prompt 2 of 2: a ===\n{second}\n"
    for options in ((), ("--stream",)):
        assert shown("--prompts", str(tmp_path / "prompts.txt"), *options) == every
