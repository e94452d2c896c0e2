"""gradwire in the Trainer of Hugging Face Transformers: one line more than with DistributedDataParallel.

pip install '.[transformers]'    (in a checkout)
torchrun --nproc-per-node 2 examples/transformers_trainer.py
"""

import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import gradwire as gw
from gradwire.integrations import transformers as gradwire_trainer


def main() -> None:
    torch.manual_seed(0)
    tokens = torch.arange(1000 * 16).reshape(1000, 16) * 7 % 61
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    sizes = {"vocab_size": 61, "n_positions": 16, "n_embd": 64, "n_layer": 2, "n_head": 4}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=20, logging_steps=10, save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True
        )
        trainer = Trainer(model, arguments, train_dataset=dataset)
        gradwire_trainer.use(trainer, plan=gw.QSGD(bits=4))
        trainer.train()
    last = trainer.state.log_history[-2]
    weights = sum(parameter.sum().item() for parameter in model.parameters())
    print(f"rank {arguments.process_index}: loss {last['loss']}, {last['gradwire_sent_mb']} MB sent a step")
    print(f"rank {arguments.process_index}: weights {weights:.6f}", flush=True)


if __name__ == "__main__":
    main()
