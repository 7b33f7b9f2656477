"""A script that trains a small Llama with DeepSpeed alone, and writes its checkpoints of ZeRO stages 1, 2 and 3."""

import sys
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from deepspeed import ops
from transformers import AutoConfig, AutoModelForCausalLM

SIZES = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(folder: Path) -> None:
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    dist.init_process_group("gloo")
    for stage in (1, 2, 3):
        torch.manual_seed(0)
        config = AutoConfig.for_model("llama", vocab_size=64, tie_word_embeddings=stage == 2, **SIZES)
        model = AutoModelForCausalLM.from_config(config)
        groups = [
            {"params": [each for each in model.parameters() if each.ndim > 1]},
            {"params": [each for each in model.parameters() if each.ndim < 2], "weight_decay": 0.0},
        ]
        settings = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            "steps_per_print": 10**9,
            "bf16": {"enabled": stage == 3},
        }
        engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(groups, lr=1e-2), config=settings)
        for step in range(3):
            ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(10 * dist.get_rank() + step))
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
        engine.save_checkpoint(str(folder / f"stage{stage}"), tag="global_step3")
        if dist.get_rank() == 0:
            config.save_pretrained(folder / f"stage{stage}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
