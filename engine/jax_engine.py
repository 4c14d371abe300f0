"""The engine on JAX: the table of programs, the buffers on the device, and the verbs that call the one on the other.

Life: made (nothing allocated: `programs` and the abstract trees are there) -> `install` executables and `set_weights` ->
`allocate` -> `touch` each program -> the verbs of `engine.api`.

The engine owns the weights, the decode state and the prefixes. Verbs pack what comes from the host into one int32 array, place
it explicitly, call one program by its name in the table and keep what it returns in place of what it donated.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from engine import functions
from engine.api import TOP_LOGPROBS, Row, SamplingParams, TokenResults
from engine.attention import PAGES_BLOCK
from engine.config import ConfigError, EngineConfig, ModelConfig
from engine.kernels import choose_attention
from engine.kinds import Kind
from engine.programs import Executable, Program
from engine.quantization import Array
from engine.sampling import NO_TOKEN, pack
from engine.segments import Segment
from engine.sharding import check_split, describe, device_config, device_model, explain_split, make_mesh, replicated
from engine.state import DecodeState, Pools, Prefix, PrefixBuffer, Step, abstract_prefix, abstract_state, mask_words, table_width
from engine.table import kind_of, make_table
from engine.weights import Weights, abstract_weights


class JaxEngine:
    """`engine.api.Engine` on JAX devices.

    Args:
      model: the model.
      config: the layout; ``config.devices`` must be ``len(devices)``.
      devices: the devices of one model, in mesh order; they may be of a machine that is not here (cross-target build).

    Raises:
      ConfigError: the layout does not fit the model or the devices.
    """

    def __init__(self, model: ModelConfig, config: EngineConfig, devices: Sequence[jax.Device]):
        _check(model, config, len(devices))
        self.model = model
        self.config = config
        self.devices = tuple(devices)
        self.mesh = make_mesh(devices, dp=config.dp, ep=config.ep)
        of_device = device_model(model, config), device_config(config)
        self.attention = choose_attention(*of_device, self.devices[0].platform)
        self._block_pages = max(1, PAGES_BLOCK // config.page_size)
        self._table_width = table_width(config, self._block_pages)
        self.abstract_weights: Weights = abstract_weights(model, config, self.mesh)
        self.abstract_state: DecodeState = abstract_state(model, config, self.mesh, self._block_pages)
        self.abstract_prefix: Prefix = abstract_prefix(model, config, self.mesh)
        self._replicated = replicated(self.mesh, (), "int32").sharding
        self._per_row = describe(self.mesh, (1,), "int32", ("rows",)).sharding
        abstract = (self.abstract_weights, self.abstract_state, self.abstract_prefix)
        self._programs, self._segments = make_table(model, config, self.mesh, self.attention, *abstract)
        self._executables: Mapping[str, Executable] = {}
        self._weights: Weights  # from `set_weights` on
        self._state: DecodeState  # from `allocate` on
        self._prefixes: collections.deque[PrefixBuffer] = collections.deque()
        self._prefix_lock = threading.Lock()
        # Programs that wait for one another on several devices must reach all of them in the same order.
        self._order = threading.Lock() if len(devices) > 1 else contextlib.nullcontext()
        self._none_generated = np.full(config.max_len, NO_TOKEN, np.int32)
        self._all_allowed = np.full(mask_words(model.vocab_size), -1, np.int32)

    # --- the table -----------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """What was chosen for this model and these devices, a line each, for people."""
        return "\n".join(filter(None, (self.attention.explain(), explain_split(self.model, self.config))))

    def programs(self) -> tuple[Program, ...]:
        """Every program that the verbs can call."""
        return tuple(self._programs.values())

    # --- start-up ------------------------------------------------------------------------------------------------------

    def install(self, executables: Mapping[str, Executable]) -> None:
        """What the verbs will call, by program name: the jitted functions or compiled executables of every program."""
        if missing := self._programs.keys() - executables.keys():
            raise ValueError(f"no executable for the programs {sorted(missing)}")
        self._executables = dict(executables)

    def empty_stacks(self) -> dict[str, Array]:
        """`engine.loader.Stacker`: zeros in the place of large weights of scanned layers, by field. After `install`."""
        stacks: dict[str, Array] = self.call("load")
        return stacks

    def place_layer(self, field: str, stack: Array, part: Array, layer: int) -> Array:
        """`engine.loader.Stacker`: the stack, donated, with one layer's part in its place."""
        return self.call(f"load/{field}", stack, part, self.put(np.array(layer, np.int32)))

    def set_weights(self, weights: Weights) -> None:
        """The weights, on the devices, as `abstract_weights` describes them."""
        self._weights = weights

    def allocate(self) -> None:
        """Creates the decode state and the prefixes."""
        self._state = self.call("init_state")
        self._prefixes = collections.deque(PrefixBuffer(self.call("init_prefix")) for _ in range(self.config.prefixes))
        jax.block_until_ready((self._state, [prefix.arrays for prefix in self._prefixes]))

    def touch(self, name: str) -> None:
        """Runs one program with dummy inputs on scratch rows and pages, and waits for it."""
        kind, size, part = kind_of(name)
        prefix = self.acquire_prefix()
        try:
            if part and kind.request is not None:
                result = self._touch_part(kind, size, part, prefix)
            else:
                result = kind.touch(self, size, prefix)
            jax.block_until_ready(result)
        finally:
            self.release_prefix(prefix)

    def _touch_part(self, kind: Kind, size: str, part: str, prefix: PrefixBuffer) -> object:
        """Runs one program of a chain; the state and the prefix are left as they were, but for scratch."""
        assert kind.request is not None
        name, request = f"{kind.name}/{size}", kind.request(self, size)
        carried: DecodeState | Prefix = prefix.arrays if kind.carries_prefix else self._state
        begin = (carried.with_pools((), ()), self._outer_weights(), request)
        x, rows = self.call(f"{name}/begin", *begin)
        if part == "begin":
            return x
        if part == "end":
            rest, *results = self.call(f"{name}/end", *begin, x)
            carried = rest.with_pools(*carried.pools)
        else:
            segment = next(segment for segment in self._segments[name] if segment.part == part)
            pools, results = self._run_segment(name, segment, carried.pools, x, rows)
            carried = carried.with_pools(*segment.into_pools(carried.pools, pools))
        if isinstance(carried, Prefix):
            prefix.arrays = carried
        else:
            self._state = carried
        return results

    # --- verbs ---------------------------------------------------------------------------------------------------------

    def acquire_prefix(self) -> PrefixBuffer:
        with self._prefix_lock:
            if not self._prefixes:
                raise LookupError(f"all {self.config.prefixes} prefix buffers are in use")
            return self._prefixes.popleft()

    def release_prefix(self, prefix: PrefixBuffer) -> None:
        if not _usable(prefix.arrays):
            prefix.arrays = self.call("init_prefix")
        with self._prefix_lock:
            self._prefixes.append(prefix)

    def prefill(
        self,
        prefix: PrefixBuffer,
        tokens: np.ndarray,
        start: int,
        sampling: SamplingParams,
        *,
        last: bool,
        next_token: int = -1,
        prompt_logprobs: bool = False,
        mask: np.ndarray | None = None,
        generated: np.ndarray | None = None,
        prompt_length: int | None = None,
    ) -> Step:
        request = self.prefill_request(
            tokens, start, sampling, last, next_token, prompt_logprobs, mask, generated, prompt_length
        )
        bucket = self.config.prefill_bucket(len(tokens))
        name = f"prefill/{bucket}"
        if name in self._segments:
            prefix.arrays, prompt, row, head = self._chain(name, prefix.arrays, request)
            first = self.first_token(prefix, head, row) if last else prompt  # of which nobody reads a row
        else:
            prefix.arrays, first, prompt = self._chain(name, prefix.arrays, request)
        return Step(first, np.arange(int(last)), prompt if prompt_logprobs else None, len(tokens))

    def first_token(self, prefix: PrefixBuffer, head: jax.Array, row: jax.Array) -> jax.Array:
        packed: jax.Array = self.call("first_token", prefix.arrays.with_pools((), ()), self._outer_weights(), head, row)
        return packed

    def prefill_request(
        self,
        tokens: np.ndarray,
        start: int,
        sampling: SamplingParams,
        last: bool,
        next_token: int = -1,
        prompt_logprobs: bool = False,
        mask: np.ndarray | None = None,
        generated: np.ndarray | None = None,
        prompt_length: int | None = None,
    ) -> jax.Array:
        count = len(tokens)
        words = self._all_allowed if mask is None else mask.view(np.int32)
        padded = np.zeros(self.config.prefill_bucket(count), np.int32)
        padded[:count] = tokens
        total = start + count if prompt_length is None else prompt_length
        header = (start, count, last, prompt_logprobs, next_token, mask is not None, total)
        return self._pack(header, self._sampling(sampling), words, self._generated(generated), padded)

    def insert(
        self,
        prefix: PrefixBuffer,
        first: Step,
        slot: int,
        pages: np.ndarray,
        length: int,
        sampling: SamplingParams,
        *,
        shared_pages: int = 0,
        generated: np.ndarray | None = None,
    ) -> None:
        header = (*self._place(slot), length, shared_pages, len(pages))
        request = self._pack(header, self._sampling(sampling), self._generated(generated), self._table_row(pages))
        self._state = self.call("insert", self._state, prefix.arrays, first.results, request)

    def fetch(self, prefix: PrefixBuffer, pages: np.ndarray, tokens: np.ndarray, *, slot: int) -> None:
        padded = np.zeros(self._table_width * self.config.page_size, np.int32)
        padded[: len(tokens)] = tokens
        group, _ = self._place(slot)
        request = self._pack((group, len(pages)), self._table_row(pages), padded)
        prefix.arrays = self.call("fetch", prefix.arrays, self._state, request)

    def set_mask(self, slot: int, mask: np.ndarray | None) -> None:
        words = self._all_allowed if mask is None else mask.view(np.int32)
        self._state = self.call("set_mask", self._state, self._pack((*self._place(slot), mask is not None), words))

    def generate(self, rows: Sequence[Row]) -> Step:
        groups = self.config.groups
        fullest = max(np.bincount([row.slot % groups for row in rows], minlength=groups).tolist())
        return self.generate_batch(rows, self.config.batch_size(fullest * groups))

    def generate_batch(self, rows: Sequence[Row], batch: int) -> Step:
        request, places = self.generate_request(rows, batch)
        self._state, results = self._chain(f"generate/{batch}", self._state, request)
        results.copy_to_host_async()
        return Step(results, places)

    def generate_request(self, rows: Sequence[Row], batch: int) -> tuple[jax.Array, np.ndarray]:
        """The rows, each in the part of the batch that its group computes; and where each is."""
        packed = np.zeros((batch, 2), np.int32)
        packed[:, 0] = self.config.group_slots  # scratch
        places = np.zeros(len(rows), np.int32)
        free = [group * (batch // self.config.groups) for group in range(self.config.groups)]
        for index, row in enumerate(rows):
            group, slot = self._place(row.slot)
            places[index] = free[group]
            packed[free[group]] = slot, row.page
            free[group] += 1
        return jax.device_put(packed, self._per_row), places

    def _place(self, slot: int) -> tuple[int, int]:
        """A slot's group, and its number there; scratch is that of group 0."""
        return slot % self.config.groups, slot // self.config.groups

    def read(self, step: Step) -> TokenResults:
        return _unpack_results(np.asarray(step.results)[step.rows])

    def read_prompt(self, step: Step) -> TokenResults:
        if step.prompt is None:
            raise ValueError("this step was made without prompt_logprobs")
        return _unpack_results(np.asarray(step.prompt)[: step.prompt_rows])

    # --- helpers -------------------------------------------------------------------------------------------------------

    def _outer_weights(self) -> Weights:
        """The weights beside the layers."""
        return dataclasses.replace(self._weights, layers=())

    def call(self, name: str, *arguments: object) -> Any:
        """Calls a program by its name in the table."""
        with self._order:
            return self._executables[name](*arguments)

    def _chain(self, name: str, carried: DecodeState | Prefix, request: jax.Array) -> Any:
        """`functions.prefill` or `generate`, in one program or in segments."""
        if name not in self._segments:
            return self.call(name, carried, self._weights, request)
        begin = (carried.with_pools((), ()), self._outer_weights(), request)
        x, rows = self.call(f"{name}/begin", *begin)
        pools = carried.pools
        for segment in self._segments[name]:
            new, x = self._run_segment(name, segment, pools, x, rows)
            pools = segment.into_pools(pools, new)
        rest, *outputs = self.call(f"{name}/end", *begin, x)
        return rest.with_pools(*pools), *outputs

    def _run_segment(self, name: str, segment: Segment, pools: Pools, x: jax.Array, rows: functions.Rows) -> Any:
        layers = self._weights.layers[segment.layers]
        return self.call(f"{name}/{segment.part}", segment.of_pools(pools), layers, x, rows)

    @property
    def state(self) -> DecodeState:
        """The decode state, for the thread that owns it."""
        return self._state

    def put(self, array: np.ndarray) -> jax.Array:
        """The array on every device."""
        placed: jax.Array = jax.device_put(array, self._replicated)
        return placed

    def _pack(self, header: Sequence[int], *parts: np.ndarray) -> jax.Array:
        return self.put(np.concatenate([np.array(header, np.int32), *parts]))

    def _sampling(self, sampling: SamplingParams) -> np.ndarray:
        adapters = 0 if self.config.adapters is None else self.config.adapters.count
        if not 0 <= sampling.adapter <= adapters:
            raise ValueError(f"adapter {sampling.adapter}: this engine has {adapters}")
        return pack(sampling)

    def _generated(self, tokens: np.ndarray | None) -> np.ndarray:
        if tokens is None:
            return self._none_generated
        padded = self._none_generated.copy()
        padded[: len(tokens)] = tokens
        return padded

    def _table_row(self, pages: np.ndarray) -> np.ndarray:
        row = np.zeros(self._table_width, np.int32)
        row[: len(pages)] = pages
        return row


def _usable(prefix: Prefix) -> bool:
    """Whether a prefix survived what was done to it. A prefill that failed when it was called leaves nothing of what was
    donated to it; one that failed on the device leaves arrays that hold the error. Does not wait for the device."""
    leaves = jax.tree.leaves(prefix)
    if any(leaf.is_deleted() for leaf in leaves):
        return False
    if leaves[-1].is_ready():
        try:
            leaves[-1].block_until_ready()
        except jax.errors.JaxRuntimeError:
            return False  # whoever read the step has the error
    return True


def _unpack_results(packed: np.ndarray) -> TokenResults:
    tokens, logprobs, top_tokens, top_logprobs = np.split(packed, [1, 2, 2 + TOP_LOGPROBS], axis=1)
    return TokenResults(
        tokens=tokens[:, 0],
        logprobs=logprobs[:, 0].copy().view(np.float32),
        top_tokens=top_tokens,
        top_logprobs=top_logprobs.copy().view(np.float32),
    )


def _check(model: ModelConfig, config: EngineConfig, devices: int) -> None:
    if config.devices != devices:
        raise ConfigError(f"dp x ep x tp = {config.devices}, but {devices} devices were given")
    check_split(model, config)
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(f"num_attention_heads = {model.num_heads} is no multiple of num_key_value_heads = {model.num_kv_heads}")
    if config.batch_sizes[-1] != config.slots:
        raise ConfigError(f"the largest of batch_sizes {config.batch_sizes} must be slots = {config.slots}")
    if config.max_len > model.max_position:
        raise ConfigError(f"max_len = {config.max_len} is over the model's {model.max_position} positions")
