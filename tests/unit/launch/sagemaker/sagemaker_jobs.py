"""SageMaker jobs in a folder with a small text file."""

from pathlib import Path

from echelon.launch.job import JobSpec
from tests.unit.recipe_samples import load_text

SETTINGS = """\
launch:
  to: sagemaker
  max_hours: 2
  sagemaker:
    role: arn:aws:iam::111122223333:role/train
    region: us-west-2
    bucket: s3://my-bucket/echelon
    instance_type: ml.g5.12xlarge
"""

RECIPE = f"""\
run: {{name: small}}
model:
  config: {{model_type: llama, hidden_size: 64}}
tokenizer: bytes
data:
  train: data/text
  sequence_len: 64
train: {{steps: 100, global_batch_size: 8}}
optim: {{learning_rate: 3e-4}}
{SETTINGS}"""


def make_job(folder: Path, *overrides: str, text: str = RECIPE) -> JobSpec:
    """The job `small-1` of the recipe above, with overrides."""
    for name, content in (("a.txt", "hello"), ("b.txt", "goodbye")):
        path = folder / "data" / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    recipe, _ = load_text(folder, text, *overrides)
    return JobSpec("small-1", recipe, Path("jobs/small-1"), folder)
