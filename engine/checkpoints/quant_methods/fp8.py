"""Float8 weights: ``fp8`` (``weight_scale_inv``, one per block of ``weight_block_size``, or ``weight_scale``, one for all or
per row) and ``fbgemm_fp8`` (``weight_scale`` per row)."""

from __future__ import annotations

from collections.abc import Mapping

from engine.checkpoints.quant_methods.base import QuantMethod, Weight, block_size
from engine.checkpoints.quant_methods.scales import scaled_weights
from engine.checkpoints.safetensors import SafetensorsCheckpoint


def fp8_weights(stored: SafetensorsCheckpoint, quantization: Mapping[str, object]) -> Mapping[str, Weight]:
    return scaled_weights(stored, block_size(stored.path, quantization))


FP8 = QuantMethod("fp8", fp8_weights)
FBGEMM_FP8 = QuantMethod("fbgemm_fp8", fp8_weights)
