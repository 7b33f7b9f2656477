"""HF Trainer as a side of a comparison: `transformers.Trainer`, unmodified, which runs blocks of steps on request."""

import time

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from measuring import synchronize


def train_in_blocks(gate, model, dataset, collator, steps, kinds=(Trainer, TrainingArguments), **options):
    """Train until the parent asks for no more blocks of `steps` steps.

    `kinds`: the classes of the trainer and of its arguments, which may be those of TRL. `options`: the arguments.
    """
    targets, num_microbatches = [], options.get("gradient_accumulation_steps", 1)

    def collate_and_count(examples):
        batch = collator(examples)
        targets.append(int((batch["labels"][:, 1:] != -100).sum()))
        return batch

    class Blocks(TrainerCallback):
        """Pauses the trainer between blocks."""

        def pause(self, control):
            control.should_training_stop = not gate.wait()
            self.seconds, self.mark = [], time.perf_counter()

        def on_train_begin(self, args, state, control, **kwargs):
            self.pause(control)

        def on_step_end(self, args, state, control, **kwargs):
            if len(self.seconds) + 1 == steps:
                synchronize()
            now = time.perf_counter()
            self.seconds.append(now - self.mark)
            self.mark = now
            if len(self.seconds) < steps:
                return
            last = state.global_step * num_microbatches  # the loader is a batch ahead
            fed = targets[last - steps * num_microbatches : last]
            losses = [row["loss"] for row in state.log_history if "loss" in row]
            gate.tell(seconds=self.seconds, targets=sum(fed), first_loss=losses[0] if losses else None)
            self.pause(control)

    trainer_class, arguments_class = kinds
    arguments = arguments_class(
        **options,
        max_steps=1000000,
        max_grad_norm=1.0,
        logging_steps=10,
        logging_first_step=True,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = trainer_class(
        model=model, args=arguments, train_dataset=dataset, data_collator=collate_and_count, callbacks=[Blocks()]
    )
    trainer.train()
