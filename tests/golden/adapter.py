"""Makes the golden data of ``adapter/``: a random LoRA of ``tiny_llama`` by peft, and what peft computes with it in float64.

Run alone: ``golden/bin/python tests/golden/adapter.py``, with ``pip install peft`` beside what `make.py` needs; the versions
are in ``adapter/versions.json``. ``golden.npz`` has a prompt, the log-prob of each of its tokens behind the first, and greedy
tokens with their log-probs. Rank-stabilized scaling, another rank and alpha for some modules, and not all layers."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import peft
import torch
import transformers

HERE = pathlib.Path(__file__).parent
BASE, OUT = HERE / "tiny_llama", HERE / "adapter"
STEPS = 8
GAP = 0.01  # nats between the best and the second best token at each greedy step


def main() -> None:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float64)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=4,
        lora_alpha=6,
        use_rslora=True,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
        layers_to_transform=[0, 2],
        rank_pattern={"v_proj": 3, r"layers\.2\.mlp\.up_proj": 6},
        alpha_pattern={"o_proj": 2},
        init_lora_weights="gaussian",
    )
    model = peft.get_peft_model(model, config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter).mul(0.2).float())  # as float32 has it
        prompt = np.random.default_rng(3).integers(0, 256, 45).tolist()
        tokens = list(prompt)
        for _ in range(STEPS):
            scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0, -1], -1)
            best = scores.topk(2)
            assert best.values[0] - best.values[1] > GAP, "a near tie: choose another seed"
            tokens.append(int(best.indices[0]))
        scores = torch.log_softmax(model(torch.tensor([tokens])).logits[0], -1)
    logprobs = scores[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].numpy()
    model.float().save_pretrained(OUT)
    (OUT / "README.md").unlink(missing_ok=True)
    settings = json.loads((OUT / "adapter_config.json").read_text())
    settings |= {"base_model_name_or_path": BASE.name, "target_modules": sorted(settings["target_modules"])}
    (OUT / "adapter_config.json").write_text(json.dumps(settings, indent=1, sort_keys=True) + "\n")
    np.savez_compressed(OUT / "golden.npz", prompt=prompt, tokens=tokens[len(prompt) :], logprobs=logprobs)
    versions = {module.__name__: module.__version__ for module in (peft, torch, transformers)}
    (OUT / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
