"""Random LoRA adapters as PEFT would save them, and checkpoints with an adapter merged into the weights, by numpy."""

from __future__ import annotations

import json
import pathlib
import shutil
import struct
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

ALL = ("q", "k", "v", "o", "gate", "up", "down")
BLOCK = {"q": "self_attn", "k": "self_attn", "v": "self_attn", "o": "self_attn", "gate": "mlp", "up": "mlp", "down": "mlp"}


def read_checkpoint(path: pathlib.Path) -> dict[str, np.ndarray]:
    """All tensors of a model.safetensors as float32; the bfloat16 of the golden ones is not numpy's own."""
    data = (path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    kinds = {"BF16": ml_dtypes.bfloat16, "F32": np.float32}
    tensors = {}
    for name, info in header.items():
        begin, end = (8 + length + offset for offset in info["data_offsets"])
        tensors[name] = np.frombuffer(data[begin:end], kinds[info["dtype"]]).reshape(info["shape"]).astype(np.float32)
    return tensors


def make_adapter(
    path: pathlib.Path,
    base: pathlib.Path,
    targets: Sequence[str] = ALL,
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 0,
    modules: Mapping[str, str] | None = None,
    **config,
) -> dict[str, np.ndarray]:
    """Writes an adapter of all layers; returns its tensors. ``modules`` names a target's module where it is not
    ``<block>.<target>_proj``; ``rank_pattern`` of the configuration gives some targets another rank."""
    random = np.random.default_rng(seed)
    weights, tensors = read_checkpoint(base), {}
    layers = 1 + max(int(name.split(".")[2]) for name in weights if name.startswith("model.layers."))
    ranks = {name.removesuffix("_proj"): value for name, value in config.get("rank_pattern", {}).items()}
    for layer in range(layers):
        for target in targets:
            module = (modules or {}).get(target, f"{BLOCK.get(target)}.{target}_proj")
            module = f"model.layers.{layer}.{module}"
            rows, columns = weights[f"{module}.weight"].shape
            r = ranks.get(target, rank)
            name = f"base_model.model.{module}"
            tensors[f"{name}.lora_A.weight"] = random.normal(0, 0.2, (r, columns)).astype(np.float32)
            tensors[f"{name}.lora_B.weight"] = random.normal(0, 0.2, (rows, r)).astype(np.float32)
    path.mkdir(parents=True)
    save_file(tensors, path / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "base_model_name_or_path": base.name, "bias": "none",
                "target_modules": [f"{target}_proj" for target in targets], "use_dora": False} | config  # fmt: skip
    (path / "adapter_config.json").write_text(json.dumps(settings))
    return tensors


def merge(out: pathlib.Path, base: pathlib.Path, adapter: Mapping[str, np.ndarray], scale) -> pathlib.Path:
    """A checkpoint whose weights are W + scale * B @ A. ``scale`` is a number, or a function of the module's name and rank."""
    out.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        if (base / file).exists():
            shutil.copy(base / file, out / file)
    weights = read_checkpoint(base)
    for name, a in adapter.items():
        if name.endswith(".lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = adapter[name.replace("lora_A", "lora_B")]
            factor = scale(module, a.shape[0]) if callable(scale) else scale
            weights[f"{module}.weight"] += np.float32(factor) * (b.astype(np.float64) @ a.astype(np.float64)).astype(np.float32)
    save_file(weights, out / "model.safetensors")
    return out
