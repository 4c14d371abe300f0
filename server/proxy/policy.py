"""Which upstream gets a request. Pure: no network and no clock, so that the simulation in ``benchmarks/fleet.py`` and tests
by hand drive the very object that the proxy uses.

`choose` compares upstreams by *cost*, the work before the request's first token, in tokens of prefill:

* the part of its prompt that the upstream has not been sent before (prefix affinity),
* prompts sent there of which no token has come back yet,
* `SEQUENCE_TOKENS` for each sequence that runs there: its steps take turns with the prefill,
* `WAIT_TOKENS` for each sequence that has to end there before this one gets a slot,
* `ADAPTER_TOKENS` if the adapter that is asked for has not been used there lately (LoRA affinity).

So requests that begin alike go to the same upstream as long as that saves more than the queue there costs, and go to the least
loaded one otherwise, which from then on has their beginning too. Who gets nothing new (leaving, ejected, not ready) is told by
`standing`.

What an upstream has been sent is kept as digests of the prompt's blocks, each of them of all that comes before it too. Blocks are
forgotten least recently used first, as the upstreams' own prefix caches do and with room for as many, and all at once when the
upstream went away. Several
proxies that know of no beginning agree where it goes: of equal costs the highest digest of (beginning, address) wins.
"""

from __future__ import annotations

import array
import collections
import dataclasses
import enum
import hashlib
from collections.abc import Collection, Iterable, Sequence

from server.proxy.ejection import Ejection

BLOCK_TOKENS = 32  # as many as a page of the prefix cache
BLOCK_CHARACTERS = 128  # of a prompt that is text: about as many tokens
CHARACTERS_PER_TOKEN = BLOCK_CHARACTERS // BLOCK_TOKENS
MAX_BLOCKS = 1024  # of one prompt; what is behind them counts as new
REMEMBERED_BLOCKS = 32_768  # of one upstream that has not said how many pages it has: a million tokens
REMEMBERED_ADAPTERS = 64  # of one upstream

SEQUENCE_TOKENS = 32
WAIT_TOKENS = 1024
ADAPTER_TOKENS = 1024


@dataclasses.dataclass(frozen=True)
class Prompt:
    """What `choose` looks at in a request: digests of its full blocks, its length in tokens (estimated, if it is text), the
    adapter (empty: the model itself), and the number of sequences it becomes."""

    blocks: tuple[bytes, ...] = ()
    tokens: int = 0
    adapter: str = ""
    samples: int = 1


def describe(prompt: str | Sequence[int], adapter: str = "", samples: int = 1) -> Prompt:
    """A prompt of text or token ids. The adapter is part of what its blocks are: keys and values depend on it."""
    if isinstance(prompt, str):
        tokens = -(-len(prompt) // CHARACTERS_PER_TOKEN)
        size, width = BLOCK_CHARACTERS, 4
        raw = prompt[: MAX_BLOCKS * size].encode("utf-32-le", "surrogatepass")
    else:
        tokens = len(prompt)
        size, width = BLOCK_TOKENS, 8
        raw = array.array("q", prompt[: MAX_BLOCKS * size]).tobytes()
    step, blocks = size * width, []
    digest = hashlib.blake2b(adapter.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    for start in range(0, len(raw) - step + 1, step):
        digest = hashlib.blake2b(digest + raw[start : start + step], digest_size=8).digest()
        blocks.append(digest)
    return Prompt(tuple(blocks), tokens, adapter, samples)


class Standing(enum.IntEnum):
    """What an upstream may be asked for, best first."""

    READY = 0
    UNKNOWN = 1  # nothing has been heard from it yet
    STARTING = 2
    OUT = 3  # ejected, unreachable or failed: the last resort
    LEAVING = 4  # it said so


_STANDINGS = {
    "ready": Standing.READY,
    "connecting": Standing.UNKNOWN,
    "loading": Standing.STARTING,
    "warming": Standing.STARTING,
    "draining": Standing.LEAVING,
}


class Replica:
    """One upstream, as far as the choice depends on it. Whoever owns it sets ``state`` and calls `heard`."""

    def __init__(self, address: str, *, eject_after: int = 3):
        self.address = address
        self.state = "connecting"  # what it last said; "connecting" before that, "unreachable" when it no longer answers
        self.slots = 1
        self.ejection = Ejection(eject_after)
        self.adapters: frozenset[str] | None = None  # that it serves; `None`: not known
        self.sequences = 0  # of this proxy, in progress there
        self.unanswered = 0  # prompt tokens sent by this proxy of which nothing has come back
        self._others = 0  # sequences that others sent
        self._remembered = REMEMBERED_BLOCKS
        self._blocks: collections.OrderedDict[bytes, None] = collections.OrderedDict()
        self._used_adapters: collections.OrderedDict[str, None] = collections.OrderedDict()
        self.turn = 0  # of the last choice that fell on it

    def heard(self, running: int, waiting: int, slots: int, pages: int = 0) -> None:
        """Its own count of sequences, of which those beyond this proxy's are others'; its slots; its KV pages (0: not known), for
        it has no more than that cached."""
        self._remembered = min(pages, REMEMBERED_BLOCKS) or REMEMBERED_BLOCKS
        self.slots = max(slots, 1)
        self._others = max(0, running + waiting - self.sequences)

    def standing(self, now: float) -> Standing:
        said = _STANDINGS.get(self.state, Standing.OUT)
        busy = self.ejection.on_trial(now) and self.sequences > 0
        return Standing.OUT if said < Standing.OUT and (busy or self.ejection.out(now)) else said

    def matched(self, prompt: Prompt) -> int:
        """Tokens of the prompt's beginning that it has been sent before."""
        count = 0
        for block in prompt.blocks:
            if block not in self._blocks:
                break
            count += 1
        return count * BLOCK_TOKENS

    def cost(self, prompt: Prompt) -> int:
        """See the module."""
        sequences = self.sequences + self._others
        new = max(1, prompt.tokens - self.matched(prompt))
        cost = new + self.unanswered + SEQUENCE_TOKENS * sequences
        cost += WAIT_TOKENS * max(0, sequences + prompt.samples - max(self.slots, prompt.samples))
        if prompt.adapter and prompt.adapter not in self._used_adapters:
            cost += ADAPTER_TOKENS
        return cost

    @property
    def load(self) -> float:
        """Sequences per slot, as well as this proxy knows."""
        return (self.sequences + self._others) / self.slots

    def offers(self, adapter: str) -> bool:
        return not adapter or self.adapters is None or adapter in self.adapters

    def forget(self) -> None:
        """It went away, and what it had cached with it."""
        self._blocks.clear()
        self._used_adapters.clear()
        self._others = 0

    def remember(self, prompt: Prompt) -> None:
        for block in reversed(prompt.blocks):  # a block without those before it is of no use: the first go last
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._remembered:
            self._blocks.popitem(last=False)
        if prompt.adapter:
            self._used_adapters[prompt.adapter] = None
            self._used_adapters.move_to_end(prompt.adapter)
            if len(self._used_adapters) > REMEMBERED_ADAPTERS:
                self._used_adapters.popitem(last=False)


class Assignment:
    """A request on its way to a replica: what it adds to the work there, until `answered` and `end`."""

    def __init__(self, replica: Replica, prompt: Prompt):
        self.replica = replica
        self.prompt = prompt
        self.cached = min(replica.matched(prompt), max(0, prompt.tokens - 1))  # tokens that it is believed to have
        self._unanswered = max(1, prompt.tokens - self.cached)
        self._open = True
        replica.sequences += prompt.samples
        replica.unanswered += self._unanswered
        replica.remember(prompt)

    def answered(self) -> None:
        """Its first message has come: the prompt is computed."""
        self.replica.unanswered -= self._unanswered
        self._unanswered = 0

    def end(self) -> None:
        """It no longer runs there. May be called again."""
        if self._open:
            self._open = False
            self.answered()
            self.replica.sequences -= self.prompt.samples


class Policy:
    """Chooses. Its only state is whose turn it is among equals."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(
        self, replicas: Iterable[Replica], prompt: Prompt, now: float, tried: Collection[Replica] = ()
    ) -> Replica | None:
        """The best replica that was not tried. One that is out is a last resort: it is chosen only if nobody better was
        there at all. `None` if nobody is left."""
        replicas = list(replicas)
        left = [replica for replica in replicas if replica not in tried]
        if any(replica.standing(now) < Standing.OUT for replica in replicas):
            left = [replica for replica in left if replica.standing(now) != Standing.OUT]
        if not left:
            return None
        best = min(left, key=lambda replica: self._key(replica, prompt, now))
        self._turn += 1
        best.turn = self._turn
        return best

    def _key(self, replica: Replica, prompt: Prompt, now: float) -> tuple[float, ...]:
        if prompt.blocks:
            name = hashlib.blake2b(prompt.blocks[0] + replica.address.encode(), digest_size=8).digest()
            tie = -int.from_bytes(name)
        else:
            tie = replica.turn  # short prompts have nothing to share: each in turn
        return (replica.standing(now), not replica.offers(prompt.adapter), replica.cost(prompt), tie)
