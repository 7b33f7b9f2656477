"""The unmodified HF Trainer in a separate process: the reference for echelon's losses.

    python hf_trainer.py CONFIG_JSON...

It does not import echelon: it reads the token file with numpy, the initial weights from an HF folder, and forms batches
with its own default collator. An adapter folder, if given, is loaded by PEFT. Prints one JSON object for each config:
the logged steps and the settings of the live optimizer.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments


class Rows(torch.utils.data.Dataset):
    """Sequence k of the token file, in the order given; the model itself shifts the labels."""

    def __init__(self, config):
        self._tokens = np.memmap(config["token_file"], dtype=config["dtype"], mode="r")
        self._order, self._length = config["order"], config["sequence_len"]

    def __len__(self):
        return len(self._order)

    def __getitem__(self, index):
        start = self._order[index] * self._length
        row = torch.from_numpy(self._tokens[start : start + self._length + 1].astype(np.int64))
        return {"input_ids": row, "labels": row.clone()}


def train(config):
    """Train as one config says; the logged steps and the settings of the optimizer."""
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)
    if config.get("adapter"):
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, config["adapter"], is_trainable=True)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=config["output_dir"],
            max_steps=config["steps"],
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-3,
            weight_decay=0.1,
            adam_beta1=0.9,
            adam_beta2=0.95,
            adam_epsilon=1e-8,
            max_grad_norm=1.0,
            lr_scheduler_type="cosine_with_min_lr",
            lr_scheduler_kwargs={"min_lr_rate": 0.1},
            train_sampling_strategy="sequential",
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Rows(config),
    )
    trainer.train()
    names = {id(each): name.removeprefix("base_model.model.") for name, each in trainer.model.named_parameters()}
    groups = [
        {key: group[key] for key in ("weight_decay", "betas", "eps")}
        | {"names": sorted(names[id(p)] for p in group["params"])}
        for group in trainer.optimizer.param_groups
    ]
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return {"rows": rows, "optimizer": type(trainer.optimizer.optimizer).__name__, "groups": groups}


torch.set_num_threads(1)
for path in sys.argv[1:]:
    print("RESULT " + json.dumps(train(json.loads(Path(path).read_text()))))
