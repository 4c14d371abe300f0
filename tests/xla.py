"""How XLA compiles in tests: for programs that run for milliseconds, most of a test's time is its compiler's.

`QUICK` takes a quarter of the processor time of what a server does (`PRODUCTION`, XLA's defaults). What comes out is the same
program up to rounding. The suite runs on `QUICK`, but for the programs of `test_golden.py` and the servers of `tests/e2e` that say
otherwise. Nothing here imports JAX: the flags must be in the environment before that.
"""

Options = dict[str, int | str]

QUICK: Options = {
    "xla_backend_optimization_level": 0,
    "xla_cpu_parallel_codegen_split_count": 1,
    "xla_backend_extra_options": "xla_cpu_disable_new_fusion_emitters",  # through MLIR, a kernel for each fusion: half of all
}
PRODUCTION: Options = {
    "xla_backend_optimization_level": 3, "xla_cpu_parallel_codegen_split_count": 32, "xla_backend_extra_options": "",
}  # fmt: skip


def flags(options: Options) -> str:
    """As ``XLA_FLAGS`` has them."""
    return " ".join(f"--{name}={value}" for name, value in options.items())
