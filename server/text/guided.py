"""Structured output: which tokens may come next so that the text keeps to a JSON schema, an expression or a grammar.

The front door compiles a grammar in a thread of its own, before the request is scheduled; `Guides` keeps what it
compiled. Each sample gets a `Matcher` of its own, which follows its tokens: the prefill thread asks it for the mask of
the first token and has it accept that token, the owner of the decode state does the same for all others
(``server/orchestrator/generate_worker.py``). A sample that was put back keeps its matcher, as it keeps its tokens.

EOS is allowed exactly where the text may end. Where nothing can follow, the sample ends without it. Grammars, their
limits and the masks are llguidance's (https://github.com/guidance-ai/llguidance, docs/syntax.md, docs/json_schema.md). What
it is given of a JSON schema is closed first (``server/text/json_schemas.py``), and GBNF is translated (``server/text/gbnf.py``).
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from server.errors import InvalidRequest
from server.text import gbnf, json_schemas
from server.text.tool_forms.base import CALLS

if TYPE_CHECKING:
    import llguidance

MAX_LENGTH = 65_536  # characters of a schema, expression or grammar: llguidance's time grows with its square
CACHED = 64  # compiled grammars that are kept
MAX_DIGITS = 20  # in a row, in JSON; what follows says nothing to a float of 64 bits nor fits into an integer of as many
MAX_STATES = 50_000  # of a lexer, each of 1-2 kB

_PLACE = re.compile(r"^(?:at )?([0-9]+)\([0-9]+\): ")  # line and column, as llguidance's errors begin
_NOT_ALLOWED = "doesn't satisfy the grammar"  # says llguidance of a token

Mask = npt.NDArray[np.uint32]  # [ceil(vocab_size / 32)], little end first: a set bit allows a token
Constraint = str | tuple[str, ...]  # of guided_choice texts, else one text


class Tokenizer(Protocol):
    """What is needed of `server.text.tokenizers.Tokenizer`."""

    vocab_size: int

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]: ...

    def token_bytes(self, id: int) -> bytes: ...

    def is_special(self, id: int) -> bool: ...


class Matcher:
    """Follows one sample. Used by one thread at a time."""

    def __init__(self, guide: Guide, native: llguidance.LLMatcher, *, ignore_eos: bool):
        self._guide = guide
        self._native = native
        self._ignore_eos = ignore_eos
        self._digits = 0  # with which the text ends, as far as it was written
        self.finished = False  # the text is complete and nothing can follow

    def mask(self) -> Mask:
        """The tokens that may come next, as `engine.api.Engine.set_mask` takes them: uint32 [ceil(vocab_size / 32)].

        Raises:
            InvalidRequest: the grammar has become too complex to go on, or no token of the model goes on with it.
        """
        mask = self._guide.fit(self._native.compute_bitmask())
        if self._native.is_error():
            raise self._failed(self._native.get_error())
        if self._guide.numbers is not None and self._digits >= MAX_DIGITS:
            mask = self._guide.numbers.ended(mask)
        if self._ignore_eos and (others := self._guide.without_eos(mask)).any():
            mask = others
        if not mask.any():
            raise self._failed("no token of the model can follow")
        return mask

    def accept(self, token: int) -> None:
        """Takes the token that was chosen.

        Raises:
            InvalidRequest: it was not allowed: everything that was, ``min_tokens`` held back. Or the grammar has become too complex.
        """
        if not self._native.consume_token(token):
            error = self._native.get_error()
            refused = _NOT_ALLOWED in error or not error
            raise self._failed("no token was left that the grammar allows and min_tokens does not hold back" if refused else error)
        self.finished = self._native.is_stopped()
        if self._guide.numbers is not None:
            self._digits = self._guide.numbers.count(self._digits, token)

    def _failed(self, reason: str) -> InvalidRequest:
        param = self._guide.param
        return InvalidRequest(f"{param} cannot be followed any further: {_short(reason)}", param=param)


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Ends numbers in JSON, whose digits would go on for ever with a small model that has begun to repeat itself.

    ``digits`` are the tokens that begin with a digit, ``text`` those of which one may come within a string: a mask that
    has digits and none of these is within a number.
    """

    digits: Mask
    text: Mask
    tokenizer: Tokenizer

    @classmethod
    def of(cls, tokenizer: Tokenizer, ids: int, vocab_size: int) -> Numbers:
        begin = [tokenizer.token_bytes(id)[:1] for id in range(ids)]
        digits = np.array([character.isdigit() for character in begin], bool)
        text = np.array([tokenizer.token_bytes(id) in (b'"', b"a") for id in range(ids)], bool)
        return cls(_mask(digits, ids, vocab_size), _mask(text, ids, vocab_size), tokenizer)

    def ended(self, mask: Mask) -> Mask:
        """The mask without digits, if it is a number's and that may end here."""
        others = mask & ~self.digits
        return others if others.any() and not (mask & self.text).any() else mask

    def count(self, before: int, token: int) -> int:
        """The digits at the end of a text that had so many before this token."""
        data = self.tokenizer.token_bytes(token)
        last = len(data) - len(data.rstrip(b"0123456789"))
        return before + last if last == len(data) else last


@dataclasses.dataclass(frozen=True)
class Guide:
    """A compiled grammar, shared by all samples that it guides. ``param`` is the request's field, for errors."""

    param: str
    _prototype: llguidance.LLMatcher
    _ids: int  # those below it may be allowed
    _vocab_size: int
    _eos: Mask
    numbers: Numbers | None = None  # where the text is JSON

    def matcher(self, *, ignore_eos: bool = False) -> Matcher:
        """For one sample. With ``ignore_eos`` EOS is allowed only where nothing else is."""
        return Matcher(self, self._prototype.deep_copy(), ignore_eos=ignore_eos)

    def fit(self, bits: bytes) -> Mask:
        """A mask of the tokenizer's vocabulary as one of the model's."""
        return fit(bits, self._ids, self._vocab_size)

    def without_eos(self, mask: Mask) -> Mask:
        return mask & ~self._eos


class Guides:
    """Compiles grammars for a model. Thread-safe.

    Args:
        tokenizer: the model's.
        eos_token_ids: all ids that end a generation.
        vocab_size: of the model. Ids that the tokenizer does not know are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], vocab_size: int):
        self._tokenizer = tokenizer
        known = [token for token in eos_token_ids if 0 <= token < min(tokenizer.vocab_size, vocab_size)]
        self._eos = known or [tokenizer.vocab_size]  # llguidance needs one; an id that is nobody's is never allowed
        self._vocab_size = vocab_size
        self._native: llguidance.LLTokenizer | None = None
        self._numbers: Numbers | None = None
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[tuple[str, Constraint], Guide] = collections.OrderedDict()

    def prepare(self) -> None:
        """Reads the vocabulary, which the first request would wait for otherwise (about 10 us a token)."""
        with self._lock:
            self._vocabulary()

    def compile(self, param: str, value: Constraint) -> Guide:
        """The guide of a request's field.

        Args:
            param: ``guided_json`` (a JSON schema), ``guided_regex``, ``guided_grammar`` (Lark or GBNF) or
                ``guided_choice`` (texts, one of which is the answer).
            value: its value.

        Raises:
            InvalidRequest: it cannot be compiled.
        """
        length = len("".join(value))
        if length > MAX_LENGTH:
            raise InvalidRequest(f"{param} must have at most {MAX_LENGTH} characters, not {length}", param=param)
        with self._lock:
            guide = self._compiled.get((param, value))
            if guide is None:
                guide = self._compiled[param, value] = self._compile(param, value)
            self._compiled.move_to_end((param, value))
            while len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
            return guide

    def _compile(self, param: str, value: Constraint) -> Guide:
        import llguidance

        try:
            grammar = self._grammar(param, value)
        except ValueError as error:
            raise _refused(param, str(error)) from None
        except RecursionError:
            raise _refused(param, "it is nested too deeply") from None
        limits = llguidance.LLParserLimits(max_lexer_states=MAX_STATES, verbose_errors=False)
        native = llguidance.LLMatcher(self._vocabulary(), grammar, log_level=0, limits=limits)
        if native.is_error():
            translated = isinstance(value, tuple) or gbnf.is_gbnf(value)  # places in that say nothing
            raise _refused(param, _PLACE.sub("" if translated else r"line \1: ", native.get_error()))
        ids = min(self._tokenizer.vocab_size, self._vocab_size)
        eos = np.zeros(ids, bool)
        eos[[token for token in self._eos if token < ids]] = True
        eos_mask = _mask(eos, ids, self._vocab_size)
        is_json = param == "guided_json" or (isinstance(value, str) and value.startswith(CALLS))
        guide = Guide(param, native, ids, self._vocab_size, eos_mask, self._numbers if is_json else None)
        first = native.deep_copy()
        mask = fit(first.compute_bitmask(), ids, self._vocab_size)
        if not np.any(mask & ~eos_mask) and not first.is_accepting():
            raise _refused(param, "it matches no text")
        return guide

    def _grammar(self, param: str, value: Constraint) -> str:
        """llguidance's own description of what it is to compile."""
        import llguidance

        if isinstance(value, tuple):  # one expression: a grammar of a thousand texts is too much for llguidance
            text = "|".join("".join(f"\\x{{{ord(character):x}}}" for character in choice) for choice in value)
            return llguidance.LLMatcher.grammar_from_regex(text)
        kind, text = param, value
        if param == "guided_json":
            schema = json.loads(text)
            if not isinstance(schema, dict):
                raise ValueError("a JSON schema is an object")
            return llguidance.LLMatcher.grammar_from_json_schema(json_schemas.guiding(schema))
        if param == "guided_grammar" and gbnf.is_gbnf(text):
            kind, text = gbnf.compiled(text, self._token_id)
        if kind in ("guided_regex", "regex"):
            return llguidance.LLMatcher.grammar_from_regex(text)
        return llguidance.LLMatcher.grammar_from_lark(text)

    def _token_id(self, text: str) -> int | None:
        """The token that a text is, all of it."""
        ids = self._tokenizer.encode(text, add_bos=False, parse_special=True)
        return ids[0] if len(ids) == 1 else None

    def _vocabulary(self) -> llguidance.LLTokenizer:
        if self._native is None:
            import llguidance

            vocabulary: Any = _Vocabulary(self._tokenizer, self._eos)
            self._native = llguidance.LLTokenizer(vocabulary, eos_token=self._eos)
            ids = min(self._tokenizer.vocab_size, self._vocab_size)
            self._numbers = Numbers.of(self._tokenizer, ids, self._vocab_size)
        return self._native


class _Vocabulary:
    """A tokenizer as llguidance reads one (its ``TokenizerWrapper``). Control tokens are no text: only a grammar that
    names one allows it."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, eos: Sequence[int]):
        ids = range(tokenizer.vocab_size)
        self.eos_token_id = eos[0]
        self.tokens = [tokenizer.token_bytes(id) for id in ids]
        self.special_token_ids = [id for id in ids if tokenizer.is_special(id)]
        if eos[0] == tokenizer.vocab_size:
            self.tokens.append(b"<end>")
            self.special_token_ids.append(eos[0])
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_bos=False)


def fit(bits: bytes, ids: int, vocab_size: int) -> Mask:
    """A bit mask whose first ``ids`` bits count as one of the model's: uint32 [ceil(vocab_size / 32)]."""
    mask = np.zeros(-(-vocab_size // 32) * 4, np.uint8)
    whole, rest = divmod(ids, 8)
    known = np.frombuffer(bits, np.uint8)
    mask[:whole] = known[:whole]
    if rest:
        mask[whole] = known[whole] & (1 << rest) - 1
    return mask.view(np.uint32)


def _mask(allowed: npt.NDArray[np.bool_], ids: int, vocab_size: int) -> Mask:
    """Of a bool for each of the first ``ids`` tokens."""
    return fit(np.packbits(allowed, bitorder="little").tobytes(), ids, vocab_size)


def _refused(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"{param} cannot be compiled: {_short(reason)}", param=param)


def _short(reason: str) -> str:
    """The first lines of llguidance's messages say it all; what follows shows the grammar."""
    line = " ".join(reason.split("<non-verbose/>")[0].split())
    return line if len(line) <= 300 else line[:297] + "..."
