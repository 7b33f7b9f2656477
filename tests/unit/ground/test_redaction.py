"""The detection of secrets in any position, and the outputs that must not contain them."""

import json
import random
import string
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from echelon.ground.errors import ConfigError, EchelonError, render_traceback
from echelon.ground.redaction import find_secrets, redact, redact_text
from echelon.launch.job_checks import check_job, refuse_secrets
from echelon.launch.records import make_job
from echelon.recipe.document import Recipe
from echelon.recipe.load import load_recipe
from echelon.recipe.names import LAUNCHERS
from echelon.recipe.render import find_secret_keys, render_recipe
from echelon.tools.sweep.sweep_file import load_sweep
from echelon.tools.sweep.sweep_folder import SweepFolder
from tests.unit.recipe_samples import DEMO, load_text

ROOT = Path(__file__).parents[3]
LETTERS, HEX = string.ascii_letters + string.digits, "0123456789abcdef"


def draw(characters: str, length: int, seed: int = 0) -> str:
    """A random key in the format of a service. These keys are generated here; no service issued them."""
    return "".join(random.Random(f"{characters}{length}{seed}").choices(characters, k=length))


AWS = draw(LETTERS + "/+", 37) + "a1Z"
# Keys that are recognised by their format.
KEYS = {
    "hugging face": "hf_" + draw(LETTERS, 34),
    "hugging face, an organisation's": "api_org_" + draw(LETTERS, 34),
    "github": "ghp_" + draw(LETTERS, 36),
    "github oauth": "gho_" + draw(LETTERS, 36),
    "github, fine-grained": "github_pat_" + draw(LETTERS, 22) + "_" + draw(LETTERS, 59),
    "gitlab": "glpat-" + draw(LETTERS, 19) + "7",
    "openai": "sk-" + draw(LETTERS, 48),
    "openai, a project's": "sk-proj-" + draw(LETTERS + "_-", 120),
    "anthropic": "sk-ant-api03-" + draw(LETTERS + "_-", 90),
    "slack": "xoxb-" + draw(string.digits, 12) + "-" + draw(LETTERS, 24),
    "aws": "AKIA" + draw(string.ascii_uppercase + string.digits, 16),
    "aws, a session's": "ASIA" + draw(string.ascii_uppercase + string.digits, 16),
    "google": "AIza" + draw(LETTERS, 35),
    "nvidia": "nvapi-" + draw(LETTERS, 64),
    "databricks": "dapi" + draw(HEX, 32),
    "npm": "npm_" + draw(LETTERS, 36),
    "jwt": "eyJ" + draw(LETTERS, 20) + ".eyJ" + draw(LETTERS, 40) + "." + draw(LETTERS + "_-", 43),
    "private key": "-----BEGIN RSA PRIVATE KEY-----\n" + draw(LETTERS, 64) + "\n-----END RSA PRIVATE KEY-----",
}

# A line of text, and its secret.
LINES = [
    ("huggingface-cli login --token {}", "hf_shorter1"),
    ("hf auth login --token={}", "hunter22"),
    ("aws configure set aws_secret_access_key {}", AWS),
    ("export AWS_SECRET_ACCESS_KEY={}", AWS),
    ("export AWS_SECRET_ACCESS_KEY={}", "/" + draw(LETTERS, 36) + "a1Z"),
    ("curl -H 'Authorization: Bearer {}' https://host/x", "abc"),
    ("curl -H 'Authorization: Basic {}' https://host/x", "bWU6cHc="),
    ("wget --header='X-Api-Key: {}' https://host/x", "abcdef"),
    ("requests.get(url, headers=dict(authorization='Bearer {}'))", "abc"),
    ("Authorization: Bearer {}", draw(LETTERS, 30)),
    ("sent with Bearer {}, refused", draw(LETTERS, 30)),
    ("curl -u me:{} https://host/x", "word"),
    ("curl --user=:{} https://host/x", "word"),
    ("pip install git+https://{}@host/x.git", "oauth2:word"),
    ("pip install git+https://{}@host/x.git", draw(LETTERS, 30)),
    ("docker login -u me -p {} registry.example", "word"),
    ("sshpass -p {} ssh host", "word"),
    ("wandb login {}", draw(HEX, 40)),
    ("wandb login --relogin {}", draw(HEX, 40)),
    ("echo machine host login me password {} > ~/.netrc", "word"),
    ("export HF_TOKEN={}", "hf_abc"),
    ("login --password='{}'", "abc d"),
    ("API_KEY={} python x.py", "abc"),
    ("export FOO_KEY={}", draw(LETTERS, 32)),
    ("docker run -e 'DB_PASSWORD={}' image", "word"),
    ("DefaultEndpointsProtocol=https;AccountName=a;AccountKey={};x=y", draw(LETTERS, 86) + "=="),
    ("https://host/x?X-Amz-Expires=600&X-Amz-Signature={}&y=1", draw(HEX, 64)),
    ("https://host/x?sv=2024-11-04&sig={}&sp=r", draw(LETTERS, 43) + "%3D"),
    ("command line, launch.env={{API_KEY: {}}}: no", "word"),
    ('{{"apiKey": "{}"}}', "word"),
    ("password: {}", draw(LETTERS, 20)),
]  # fmt: skip

# Text without a secret.
PLAIN = [
    "export HF_TOKEN=$(cat /run/token)", "TOKEN=`x`", "GOOGLE_APPLICATION_CREDENTIALS=/run/key", "A=1 B=token",
    "export WANDB_API_KEY=$KEY", 'export TOKEN="${TOKEN}"', "curl -H \"Authorization: Bearer $TOKEN\" https://host/x",
    "git clone https://oauth2:${T}@host/x.git", "git clone ssh://git@github.com/a/b.git", "git@github.com:a/b.git",
    "pip install git+https://github.com/wandb/wandb@" + draw(HEX, 40), "git checkout " + draw(HEX, 40),
    "111122223333.dkr.ecr.us-west-2.amazonaws.com/train:" + draw(HEX, 40),
    "registry.example/train@sha256:" + draw(HEX, 64), "arn:aws:iam::111122223333:role/train-key",
    "arn:aws:secretsmanager:us-east-1:111122223333:secret:hub-AbCdEf", "s3://bucket/keys/" + draw(HEX, 32) + "/x",
    "hf-internal-testing/tiny-random-LlamaForCausalLM", "meta-llama/Llama-3.2-1B-Instruct", "hf_transfer==0.1.9",
    "HF_HUB_ENABLE_HF_TRANSFER=1", "TOKENIZERS_PARALLELISM=false", "--max-tokens 512", "max_new_tokens=512",
    "the token: a unit of text", "A secret: never share a password with anybody", "password: ask the team",
    "use --token to log in", "docker login --password-stdin registry.example", "ssh login.cluster -p 2222 hostname",
    "sort_key=created_at", "def f(token=None, api_key=os.environ['KEY'])", "secret=getpass.getpass()",
    "aws secretsmanager get-secret-value --secret-id hf --query SecretString --output text", "sk-learn and task-based",
    "Bearer of good news, said the authorization department", "runs/2026-01-02-token-count/step-00000100",
    "token=5 must be at least 6", "CUDA_VISIBLE_DEVICES=0,1 NCCL_SOCKET_IFNAME=eth0 bash run.sh",
    "a.b.c: 0123456789abcdef0123456789abcdef", "sqlite:////home/me@work/mlflow.db", "http://localhost:8080/x",
]  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_key_is_found_in_any_position(key):
    secret = KEYS[key]
    for around in ("{}", "echo {}", "x={} y", '{{"a": "{}"}}', "[{}]", "'{}'", "https://host/?x={}", "say {}."):
        text = around.format(secret)
        assert redact_text(text) == around.format("***"), text
    assert redact({"note": [secret]}) == {"note": ["***"]} and redact({secret: 1}) == {"***": 1}
    assert list(find_secrets({"a": [{"b": f"x {secret}"}]})) == [("a", 0, "b")]


@pytest.mark.parametrize(("line", "secret"), LINES)
def test_a_secret_in_a_line_is_redacted_and_the_rest_is_kept(line, secret):
    assert redact_text(line.format(secret)) == line.format("***")
    assert redact_text(line.format("***")) == line.format("***")


@pytest.mark.parametrize("text", PLAIN)
def test_text_without_a_secret_is_unchanged(text):
    assert redact_text(text) == text
    assert redact({"note": text}) == {"note": text}


def test_names_of_keys():
    secrets = {
        "api_key": "a", "env": {"HF_TOKEN": "b", "WANDB_API_KEY": "c", "aws-secret": "d", "Password": "e"},
        "list": [{"client_secret": "f"}], "apiKey": "g", "HF_TOKEN_READ": "h", "DB_PASSWORD_2": "i",
        "MY_PAT": draw(LETTERS, 30), "FOO_KEY": draw(LETTERS, 30), "url": "https://me:j@host/x", "passwords": 3,
    }  # fmt: skip
    assert redact(secrets) == {
        "api_key": "***", "env": {"HF_TOKEN": "***", "WANDB_API_KEY": "***", "aws-secret": "***", "Password": "***"},
        "list": [{"client_secret": "***"}], "apiKey": "***", "HF_TOKEN_READ": "***", "DB_PASSWORD_2": "***",
        "MY_PAT": "***", "FOO_KEY": "***", "url": "https://***@host/x", "passwords": 3,
    }  # fmt: skip
    plain = {
        "eos_token": "</s>", "pad_token_id": 0, "special_tokens.eos_token": "<|im_end|>", "bos_token": "BOS",
        "special_tokens": {"pad_token": "<pad>", "additional": ["<a>"]}, "new_tokens": ["<|im_start|>"],
        "fim_token": "[FIM]", "max_tokens": "h", "tokenizer": "i", "token": 5, "kms_key": draw(HEX, 32),
        "tolerations": [{"key": "nvidia.com/gpu"}], "env_from_secrets": ["hub"], "secret_name": "hub",
        "GOOGLE_APPLICATION_CREDENTIALS": "/run/key.json", "HF_TOKEN_PATH": "/run/token",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "HF_TOKEN": "$(cat /x)",
        "SORT_KEY": "created_at", "IMAGE_KEY": "image-of-the-first-page-2024", "MONKEY": draw(LETTERS, 30),
    }  # fmt: skip
    assert redact(plain) == plain


def test_random_draws():
    """Keys of any length with a suggestive name are redacted; names of words, sizes and versions never are."""
    drawn = random.Random(7)
    words = ["llama", "Mistral", "chat", "v2", "7b", "8x7B", "2024", "instruct", "final", "step", "GPTQ", "q4", "tiny"]
    for _ in range(2000):
        length = drawn.randrange(20, 80)
        secret = "".join(drawn.choices(drawn.choice([LETTERS, HEX, LETTERS + "-_"]), k=length)).strip("-_") + "x9Q4"
        name = drawn.choice(["MY_KEY", "hubToken", "client-secret", "db.password", "AUTH", "GH_PAT"])
        before, after = (drawn.choice(["", "x ", 'say "', "\n", "a=b; "]) for _ in range(2))
        text = f"{before}{name}={secret}{after[::-1]}"
        assert secret not in redact_text(text), text
        assert redact_text(redact_text(text)) == redact_text(text)
        path = drawn.choice("-_./").join(drawn.choices(words, k=drawn.randrange(1, 9)))
        assert redact({"DATA_KEY": path, "checkpoint": path}) == {"DATA_KEY": path, "checkpoint": path}


LONG = (
    "login ", "curl -u ", "key ", "{token: ", "://a:", "a-", "wandb login ", "eyJ", "sk-a", 'token="', "sk-a.",
    "glpata-a.", "xoxb-aaaaaaaaaa.", "sk-aaaaaaaaaaaaaaa-aaaaaaaaa.",
)  # fmt: skip


@pytest.mark.parametrize("text", [*LONG, "curl -u{}="])
def test_a_long_text_takes_time_in_proportion(text):
    """400,000 characters take a second or two; a pattern that looks ahead without limit would take minutes."""
    start, _, piece = text.rpartition("{}")
    program = (
        "import resource, sys; from echelon.ground.redaction import redact_text\n"
        "resource.setrlimit(resource.RLIMIT_CPU, (12, 12))\n"
        "redact_text(sys.argv[1] + sys.argv[2] * (400_000 // len(sys.argv[2])))"
    )
    assert subprocess.run([sys.executable, "-c", program, start, piece], check=False).returncode == 0


def test_a_key_that_a_dot_cuts_is_found():
    assert redact_text("sk-" + "b" * 24 + ".1 x") == "***.1 x"
    assert redact_text("xoxb-" + "b" * 24 + ".1 x") == "***.1 x"


def test_a_brace_that_is_still_open_makes_names_of_words():
    assert redact_text("{" + "a" * 10_000 + " password: word, x}") == "{" + "a" * 10_000 + " password: ***, x}"
    assert redact_text("{}" + "a" * 10_000 + " password: word, x") == "{}" + "a" * 10_000 + " password: word, x"


def test_shipped_recipes_and_pages_contain_no_secrets():
    for path in [*ROOT.glob("recipes/**/*.yaml"), *ROOT.glob("docs/*.md"), ROOT / "README.md"]:
        if path.name == "security.md":  # shows examples
            continue
        text = path.read_text()
        assert redact_text(text) == text, path
        if path.suffix == ".yaml":
            assert not list(find_secrets(yaml.safe_load(text)))


def test_a_rendered_recipe_redacts_secrets_under_any_key(tmp_path):
    recipe, _ = load_text(
        tmp_path, DEMO, f"launch.env={{MY_PAT: {KEYS['github']}}}",
        f"launch.setup={json.dumps(['wandb login ' + draw(HEX, 40)])}", f"evaluate.prompts=['{KEYS['aws']} is']",
    )  # fmt: skip
    text = render_recipe(recipe)
    assert not any(secret in text for secret in (KEYS["github"], KEYS["aws"], draw(HEX, 40)))
    assert sorted(find_secret_keys(recipe)) == ["evaluate.prompts.0", "launch.env.MY_PAT", "launch.setup.0"]
    (tmp_path / "again.yaml").write_text(text)
    again, _ = load_recipe(tmp_path / "again.yaml")
    assert isinstance(again, Recipe) and render_recipe(again) == text


def test_errors_and_tracebacks_show_no_secrets(tmp_path):
    with pytest.raises(ConfigError) as refused:
        load_text(tmp_path, DEMO, f"train.steps={KEYS['openai']}")
    assert KEYS["openai"] not in str(refused.value) and "train.steps=***" in str(refused.value)
    assert str(EchelonError(f"at https://me:{AWS.replace('/', '')}@host")) == "at https://***@host"
    try:
        raise RuntimeError(f"401 for {KEYS['hugging face']}")
    except RuntimeError as error:
        assert "401 for ***" in render_traceback(error) and KEYS["hugging face"] not in render_traceback(error)


REFUSED = {
    "launch.env.HF_TOKEN": ("launch.env={{HF_TOKEN: {}}}", "hunter2hunter2"),
    "launch.env.MY_PAT": ("launch.env={{MY_PAT: {}}}", KEYS["github"]),
    "launch.env.FOO_KEY": ("launch.env={{FOO_KEY: {}}}", draw(LETTERS, 32)),
    "launch.env.ANYTHING": ("launch.env={{ANYTHING: {}}}", KEYS["aws"]),
    "launch.setup.1": ('launch.setup=["true", "huggingface-cli login --token {}"]', KEYS["hugging face"]),
    "launch.python": ("launch.python=env X={} python", KEYS["openai"]),
    "launch.torchrun.ssh_options.0": ("launch.torchrun.ssh_options=['{}']", KEYS["jwt"]),
    "launch.slurm.options.comment": ("launch.slurm.options={{comment: {}}}", KEYS["slack"]),
    "launch.sagemaker.tags.password": ("launch.sagemaker.tags={{password: {}}}", "hunter2"),
    "launch.sagemaker.distribution.mpi.custom_mpi_options": (
        "launch.sagemaker.distribution={{mpi: {{custom_mpi_options: -x MY_TOKEN={}}}}}", "hunter2"),
    "mlflow.tracking_uri": ("mlflow.tracking_uri=https://me:{}@host/", "hunter2"),
    "evaluate.prompts.0": ("evaluate.prompts=['{}']", KEYS["google"]),
    "model.config.note": ("model.config.note={}", KEYS["gitlab"]),
}  # fmt: skip


@pytest.mark.parametrize("target", LAUNCHERS.own)
@pytest.mark.parametrize("key", REFUSED)
def test_a_launch_refuses_a_secret_by_key_without_its_value(tmp_path, key, target):
    override, secret = REFUSED[key]
    recipe, _ = load_text(tmp_path, DEMO, override.format(secret), f"launch.to={target}")
    with pytest.raises(ConfigError, match=rf"^{key} looks like a secret, and launch\.to={target} stores") as refused:
        refuse_secrets(recipe)
    assert not any(secret[at : at + 6] in str(refused.value) for at in range(len(secret) - 5))


def test_the_command_refuses_before_anything_is_rendered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("text " * 1000)
    for line in ("curl https://me:word@host", f"aws configure set aws_secret_access_key {AWS}"):
        recipe, _ = load_text(tmp_path, DEMO, f"launch.setup={json.dumps([line])}", "launch.to=local")
        with pytest.raises(ConfigError, match=r"launch\.setup\.0 looks like a secret"):
            check_job(make_job(recipe, tmp_path))
    assert not (tmp_path / "jobs").exists()
    fine = ["export HF_TOKEN=$(cat /run/token)", "TOKEN=`x`", "GOOGLE_APPLICATION_CREDENTIALS=/run/key", "A=1 B=token"]
    recipe, _ = load_text(tmp_path, DEMO, f"launch.setup={json.dumps(fine)}", "launch.to=local")
    texts = check_job(make_job(recipe, tmp_path)).texts
    assert all(line in "".join(texts.values()) for line in fine)


def test_a_sweep_stores_no_secret_and_resumes(tmp_path):
    (tmp_path / "demo.yaml").write_text(DEMO)
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "sweep: {name: a, trials: 2}\nrecipe: demo.yaml\n"
        "search: {optim.learning_rate: {low: 1e-4, high: 1e-3, log: true}}\n"
        f"set: {{launch.env: {{MY_PAT: {KEYS['github']}}}}}\n"
    )
    sweep, folder = load_sweep(path), SweepFolder(tmp_path / "folder")
    recipe, _ = load_text(tmp_path, DEMO)
    folder.lock()
    folder.agree(sweep, recipe)
    folder.agree(sweep, recipe)
    assert KEYS["github"] not in folder.sweep_path.read_text() and "***" in folder.sweep_path.read_text()
    folder.unlock()
