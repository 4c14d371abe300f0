"""Strict settings for every test: two fake devices, no silent promotion of dtypes or ranks."""

import os

from tests import xla

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2 {xla.flags(xla.QUICK)}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
