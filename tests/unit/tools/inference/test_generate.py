"""HF folders: sampling and losses compared with transformers and by hand; conversations, also on a pipe."""

import io
import json
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import echelon
from echelon.cli.commands.trained_models import read_prompts
from echelon.ground.errors import ConfigError
from echelon.learn.answers.sampling import Sampling, build_processors, draw_tokens
from echelon.learn.data.tokenizer import build_bytes_tokenizer, train_tokenizer
from echelon.tools.inference.evaluate import evaluate_model
from echelon.tools.inference.generate import TextStream, generate_samples
from tests.dist.command import CommandLine
from tests.families import small_config
from tests.unit.learn.answers.test_reward_models import TALK, write_scorer

TEXT = "The café serves naïve résumés, 東京 and 👍🏽 to all. " * 20
PROMPTS = ["The café", "a", "naïve résumés, 東京 and more"]


def write_model(path, kind, template=None, **fields):
    """Write an HF folder with a small random model and a byte-level BPE tokenizer that splits characters."""
    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**small_config(kind, True) | {"vocab_size": 320} | fields)
    )
    for parameter in model.parameters():  # far from uniform, so that greedy choices are not close to ties
        parameter.data.mul_(4)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def folder(request, tmp_path_factory):
    """An HF folder without a chat template."""
    return write_model(tmp_path_factory.mktemp(request.param), request.param)


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


def test_several_samples_have_headers_and_a_single_one_is_bare_text(echelon, folder, tmp_path):
    def shown(*options):
        code, out, _ = echelon("generate", folder, *options, "--max-tokens", "3", "--temperature", "0")
        assert not code
        return out

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


LABELS = ("low", "middle", "high")
TEXTS = [{"text": f"{number} plus {number} is {2 * number}.", "label": LABELS[number % 3]} for number in range(7)]


def write_records(folder, records):
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "records.jsonl"


def scores_of(folder, encoded):
    """The scores of texts, one by one, [texts, scores]."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return torch.cat([model(torch.tensor([ids])).logits for ids in encoded])


def test_a_classifier_has_the_loss_and_accuracy_of_transformers(tmp_path):
    tokenizer = write_scorer(tmp_path / "model", labels=LABELS)
    found = evaluate_model(tmp_path / "model", write_records(tmp_path, TEXTS))
    scores = scores_of(tmp_path / "model", [tokenizer(record["text"])["input_ids"] for record in TEXTS])
    labels = torch.tensor([LABELS.index(record["label"]) for record in TEXTS])
    assert found["loss"] == pytest.approx(torch.nn.functional.cross_entropy(scores, labels).item(), abs=1e-5)
    assert found["accuracy"] == pytest.approx((scores.argmax(-1) == labels).float().mean().item())
    assert found["texts"] == 7 and {name: row["texts"] for name, row in found["labels"].items()} == {
        "low": 3, "middle": 2, "high": 2
    }  # fmt: skip


def test_a_reward_model_has_the_loss_and_accuracy_of_transformers(tmp_path):
    tokenizer = write_scorer(tmp_path / "model")
    sides = [[*TALK, {"role": "assistant", "content": text}] for text in ("7.", "8 or so", "7", "I do not know")]
    pairs = [{"chosen": sides[0], "rejected": sides[1], "margin": 0.5}, {"chosen": sides[2], "rejected": sides[3]}]
    found = evaluate_model(tmp_path / "model", write_records(tmp_path, pairs))
    texts = [tokenizer.apply_chat_template(side, tokenize=False) for side in sides]
    scores = scores_of(tmp_path / "model", [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts])
    ahead = scores[0::2, 0] - scores[1::2, 0]
    expected = -torch.nn.functional.logsigmoid(ahead - torch.tensor([0.5, 0.0])).mean()
    assert found["loss"] == pytest.approx(expected.item(), abs=1e-5) and found["pairs"] == 2
    assert found["reward_accuracy"] == (ahead > 0).float().mean().item()


def test_records_of_another_kind_are_refused(tmp_path):
    write_scorer(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"has other records than preference pairs .*is a model that scores texts"):
        evaluate_model(tmp_path / "model", write_records(tmp_path, [{"text": "3 plus 4 is 7."}] * 4))


def test_several_labels_of_one_text_are_refused(tmp_path):
    write_scorer(tmp_path / "model", labels=LABELS)
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    config["problem_type"] = "multi_label_classification"
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"problem_type=multi_label_classification in config\.json"):
        evaluate_model(tmp_path / "model", write_records(tmp_path, TEXTS))


TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
POSITIONS = 220


@pytest.fixture(scope="module")
def talker(tmp_path_factory):
    """An HF folder with a chat template and a limit of positions."""
    return write_model(tmp_path_factory.mktemp("model"), "llama", TEMPLATE, max_position_embeddings=POSITIONS)


def answer_of(talker, messages, max_tokens):
    """The greedy answer of transformers alone."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(talker), AutoTokenizer.from_pretrained(talker)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
    said = model.generate(ids, max_new_tokens=max_tokens, do_sample=False)
    return tokenizer.decode(said[0, ids.shape[1] :], skip_special_tokens=True)


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


def test_every_answer_follows_all_turns_before_it(talker):
    dialogue = echelon.chat(talker, max_tokens=8, temperature=0, system="Be kind.")
    turns = [{"role": "system", "content": "Be kind."}]
    for message in ("The café", "東京?", "a"):
        pieces = []
        answer = dialogue.ask(message, pieces.append).text
        turns.append(user(message))
        assert answer == "".join(pieces) == answer_of(talker, turns, 8)
        turns.append(assistant(answer))
    assert dialogue.turns == turns[1:]
    dialogue.reset()
    assert dialogue.ask("a").text == answer_of(talker, [turns[0], user("a")], 8)
    dialogue.reset("Be rude.")
    assert dialogue.ask("a").text == answer_of(talker, [{"role": "system", "content": "Be rude."}, user("a")], 8)


def test_answers_have_their_own_random_draws(talker):
    options = {"max_tokens": 8, "temperature": 1.5}
    said = []
    for _ in range(2):
        dialogue = echelon.chat(talker, **options)
        for _ in range(3):
            said.append(dialogue.ask("a").text)
            dialogue.reset()
    assert said[:3] == said[3:] and len(set(said)) == 3
    assert said[0] == echelon.generate(talker, "a", chat=True, **options)


def test_the_oldest_turns_leave_a_full_conversation_and_one_message_says_so(talker, caplog):
    dialogue = echelon.chat(talker, max_tokens=20, temperature=0)
    tokenizer = AutoTokenizer.from_pretrained(talker)
    kept = []
    for number in range(12):
        kept.append(user(f"question {number}"))
        ids = tokenizer.apply_chat_template(kept, add_generation_prompt=True)["input_ids"]
        while len(ids) + 20 > POSITIONS:
            kept = kept[2:]
            ids = tokenizer.apply_chat_template(kept, add_generation_prompt=True)["input_ids"]
        kept.append(assistant(dialogue.ask(f"question {number}").text))
        assert dialogue.turns == kept
    assert len(kept) < 24  # turns were dropped
    [note] = [each.message for each in caplog.records if "oldest turns" in each.message]
    assert f"the {POSITIONS} positions of the model" in note
    dialogue.reset()
    for _ in range(12):
        dialogue.ask("once more in a new conversation")
    assert sum("oldest turns" in each.message for each in caplog.records) == 2


def test_a_long_message_gets_a_short_answer_or_is_refused(talker):
    dialogue = echelon.chat(talker, max_tokens=POSITIONS, temperature=0)
    ids = AutoTokenizer.from_pretrained(talker).apply_chat_template([user("a")], add_generation_prompt=True)[
        "input_ids"
    ]
    assert dialogue.ask("a").text == answer_of(talker, [user("a")], POSITIONS - len(ids))
    before = dialogue.turns
    with pytest.raises(ConfigError, match=rf"the message has \d+ tokens .* {POSITIONS} positions; send a shorter one"):
        dialogue.ask("a z" * POSITIONS)
    assert dialogue.turns == before


def test_an_interrupt_keeps_the_part_that_was_shown(talker):
    dialogue = echelon.chat(talker, max_tokens=30, temperature=0)
    pieces = []

    def write(text):
        pieces.append(text)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dialogue.ask("The café", write)
    shown = "".join(pieces)
    assert dialogue.turns == [user("The café"), assistant(shown)]
    assert answer_of(talker, [user("The café")], 30).startswith(shown)
    assert dialogue.ask("a").text == answer_of(talker, [*dialogue.turns[:2], user("a")], 30)


def test_a_model_without_a_template_is_refused(talker, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(talker / name)
    with pytest.raises(ConfigError, match="has no chat template"):
        echelon.chat(tmp_path)


@pytest.fixture
def piped(capfd, monkeypatch, talker):
    """Runs `echelon generate --chat` with these lines on stdin."""

    def run(lines, *options):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
        return CommandLine(capfd, monkeypatch)("generate", talker, "--chat", "--max-tokens", "8", *options)

    return run


def test_a_pipe_gets_one_line_for_each_message(piped, talker):
    ended = piped("The café\n\n東京?\n/reset\n東京?\n /quit \nnever read\n".encode(), "--temperature", "0")
    first = answer_of(talker, [user("The café")], 8)
    second = answer_of(talker, [user("The café"), assistant(first), user("東京?")], 8)
    expected = [first, second, answer_of(talker, [user("東京?")], 8)]
    assert ended.code == 0, ended.err
    assert ended.out == "".join(each.replace("\n", "\\n") + "\n" for each in expected)
    assert ended.err == ""
    ended = piped("The café\n/system Be kind.\na".encode(), "--temperature", "0", "--json")
    rows = [json.loads(line) for line in ended.out.splitlines()]
    kind = answer_of(talker, [{"role": "system", "content": "Be kind."}, user("a")], 8)
    assert [(row["prompt"], row["text"]) for row in rows] == [("The café", first), ("a", kind)]


@pytest.mark.parametrize(
    ("lines", "options", "message"),
    [
        (b"", (), "stdin contains no message"),
        (b"\xff\n", (), "stdin cannot be read"),
        (b"a\n/rest\n", (), "'/rest' is not a command"),
        (b"a\n/system\n", (), "'/system' is not a command"),
        (b"a\n/reset all\n", (), "'/reset all' is not a command"),
        (b"a\n", ("--num-samples", "2"), "--num-samples 2 requires --prompt or --prompts"),
        (b"a\n", ("--out", "x.jsonl"), "--out x.jsonl requires --prompt or --prompts"),
        (b"a\n", ("--prompt", "a", "--prompts", "a.txt"), "generate needs one of --prompt TEXT and --prompts FILE"),
    ],
)
def test_what_a_pipe_cannot_say_is_refused(piped, lines, options, message):
    ended = piped(lines, *options)
    assert ended.code == 2
    assert ended.err.startswith("echelon: ") and message in ended.err


def test_a_path_is_a_message(piped):
    ended = piped(b"/usr/bin\n")
    assert (ended.code, len(ended.out.splitlines())) == (0, 1)


def test_without_chat_a_prompt_is_required(capfd, monkeypatch, talker):
    ended = CommandLine(capfd, monkeypatch)("generate", talker)
    assert ended.code == 2
    assert ended.err == "echelon: generate needs one of --prompt TEXT and --prompts FILE; give one.\n"
