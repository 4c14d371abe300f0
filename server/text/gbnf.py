"""GBNF, llama.cpp's grammars, as grammars of llguidance.

    root  ::= "- " item ("\\n" item)*      # the answer is what root stands for
    item  ::= [^\\n]{1,80} | <think>

The syntax and its meaning are those of llama.cpp (its ``grammars/README.md``), and a line that begins with ``|`` continues
the rule before it. A grammar is about characters: it has no lexer, and text is looked at in every way in which the rules can
read it. llguidance's Lark has one, which takes the longest match and never goes back, so that ``[a-z]* "x"`` would match
nothing. Hence

* a grammar that is not recursive becomes one regular expression,
* in any other, each character is a terminal of its own, but for parts with which the lexer cannot go wrong (`_Lark`).
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NoReturn

MAX_REPEATS = 2000  # llama.cpp's
MAX_EXPRESSION = 400_000  # characters of a regular expression; a rule that is used twice is in it twice
LOOK_AHEAD = 16  # items behind a repetition, all optional, until one shows that it has ended
MAX_ROUNDS = 12  # of looking for terminals that others could be taken for
LAST = 0x10FFFF
_RULE = re.compile(r"^[ \t]*[A-Za-z0-9_-]+[ \t]*::=", re.MULTILINE)
_NAME = re.compile(r"[A-Za-z0-9_-]+")
_DIGITS = re.compile(r"[0-9]+")
_HEX = {"x": re.compile("[0-9a-fA-F]{2}"), "u": re.compile("[0-9a-fA-F]{4}"), "U": re.compile("[0-9a-fA-F]{8}")}
_ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **dict.fromkeys('\\"[]-', None)}
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")


def is_gbnf(text: str) -> bool:
    """Whether a grammar is written in GBNF; Lark has no ``::=``."""
    return _RULE.search(text) is not None


def compiled(text: str, token_id: Callable[[str], int | None]) -> tuple[str, str]:
    """What a grammar is to llguidance: ``("regex", expression)`` or ``("lark", grammar)``.

    Args:
        token_id: finds the token that a text like ``<think>`` is, all of it.

    Raises:
        ValueError: it is not GBNF; the message names the line.
    """
    rules = _Parser(text, token_id).rules()
    regular = _Regular(rules)
    if regular.is_regular(rules["root"]):
        return "regex", regular.expression(rules["root"])
    return "lark", _Lark(rules, regular).text()


# A rule's right-hand side.


_Ranges = tuple[tuple[int, int], ...]  # of code points, ends included


@dataclasses.dataclass(frozen=True)
class _Characters:
    """One character, of any of these."""

    ranges: _Ranges


@dataclasses.dataclass(frozen=True)
class _Token:
    id: int
    negated: bool


@dataclasses.dataclass(frozen=True)
class _Name:
    name: str
    line: int


@dataclasses.dataclass(frozen=True)
class _Sequence:
    items: tuple[_Node, ...]


@dataclasses.dataclass(frozen=True)
class _Choice:
    items: tuple[_Node, ...]


@dataclasses.dataclass(frozen=True)
class _Repeat:
    item: _Node
    low: int
    high: int | None


_Node = _Characters | _Token | _Name | _Sequence | _Choice | _Repeat
_Rules = dict[str, _Node]


class _Parser:
    def __init__(self, text: str, token_id: Callable[[str], int | None]):
        self._text = text
        self._token_id = token_id
        self._place = 0

    def rules(self) -> _Rules:
        """All rules; a later one replaces an earlier one of its name."""
        rules: _Rules = {}
        self._skip(_SPACE_AND_LINES)
        while self._place < len(self._text):
            name = self._match(_NAME, "the name of a rule")
            self._skip(_SPACE)
            self._expect("::=")
            self._skip(_SPACE_AND_LINES)
            rules[name] = self._choice(nested=False)
            if self._place < len(self._text) and not self._at("\r", "\n"):
                self._fail(f"the end of the line, or more of the rule {name}, is expected")
            self._skip(_SPACE_AND_LINES)
        if "root" not in rules:
            raise ValueError("there is no rule root, with which the answer begins")
        for node in rules.values():
            for used in _names(node):
                if used.name not in rules:
                    raise ValueError(f"line {used.line}: there is no rule {used.name}")
        return rules

    def _choice(self, nested: bool) -> _Node:
        items = [self._sequence(nested)]
        while self._bar(nested):
            items.append(self._sequence(nested))
        return items[0] if len(items) == 1 else _Choice(tuple(items))

    def _bar(self, nested: bool) -> bool:
        """Takes the mark before an alternative, which may begin a line."""
        begin = self._place
        self._skip(_SPACE_AND_LINES)
        if self._at("|"):
            self._place += 1
            self._skip(_SPACE_AND_LINES)
            return True
        if not nested:
            self._place = begin
        return False

    def _sequence(self, nested: bool) -> _Node:
        space = _SPACE_AND_LINES if nested else _SPACE
        items: list[_Node] = []
        while True:
            item = self._item()
            if item is not None:
                items.append(item)
            elif self._at("*", "+", "?", "{"):
                if not items:
                    self._fail("there is nothing to repeat")
                items.append(_Repeat(items.pop(), *self._times()))
            else:
                return items[0] if len(items) == 1 else _Sequence(tuple(items))
            self._skip(space)

    def _item(self) -> _Node | None:
        if self._at('"'):
            return self._literal()
        if self._at("["):
            return self._class()
        if self._at("."):
            self._place += 1
            return _Characters(_inverse([]))
        if self._at("<", "!"):
            return self._token()
        if self._at("("):
            self._place += 1
            self._skip(_SPACE_AND_LINES)
            item = self._choice(nested=True)
            self._expect(")")
            return item
        name = _NAME.match(self._text, self._place)
        if name is None:
            return None
        item = _Name(name[0], self._line())
        self._place = name.end()
        return item

    def _times(self) -> tuple[int, int | None]:
        mark = self._text[self._place]
        self._place += 1
        if mark != "{":
            return (1 if mark == "+" else 0), (1 if mark == "?" else None)
        self._skip(_SPACE_AND_LINES)
        low = high = self._number()
        self._skip(_SPACE_AND_LINES)
        limit: int | None = high
        if self._at(","):
            self._place += 1
            self._skip(_SPACE_AND_LINES)
            limit = None if self._at("}") else self._number()
            self._skip(_SPACE_AND_LINES)
        if limit is not None and limit < low:
            self._fail(f"{{{low},{limit}}} is no range of repetitions")
        self._expect("}")
        return low, limit

    def _number(self) -> int:
        digits = self._match(_DIGITS, "a number of repetitions")
        if len(digits) > 9 or int(digits) > MAX_REPEATS:
            self._fail(f"at most {MAX_REPEATS} repetitions can be counted")
        return int(digits)

    def _literal(self) -> _Node:
        begin = self._line()
        self._place += 1
        characters: list[_Node] = []
        while not self._at('"'):
            if self._place == len(self._text):
                raise ValueError(f'line {begin}: the text that begins here has no closing "')
            code = self._character()
            characters.append(_Characters(((code, code),)))
        self._place += 1
        return characters[0] if len(characters) == 1 else _Sequence(tuple(characters))

    def _class(self) -> _Node:
        begin = self._line()
        self._place += 1
        negated = self._at("^")
        self._place += negated
        ranges = []
        while not self._at("]"):
            if self._place == len(self._text):
                raise ValueError(f"line {begin}: the characters that begin here have no closing ]")
            low = high = self._character()
            if self._at("-") and not self._text.startswith("-]", self._place):
                self._place += 1
                high = self._character()
                if high < low:
                    self._fail(f"{chr(low)}-{chr(high)} is no range of characters")
            ranges.append((low, high))
        self._place += 1
        if not ranges:
            self._fail("there is no character between [ and ]")
        return _Characters(_inverse(ranges) if negated else tuple(ranges))

    def _character(self) -> int:
        if self._place == len(self._text):
            self._fail("the grammar ends within characters")
        character = self._text[self._place]
        self._place += 1
        if character != "\\":
            return ord(character)
        kind = self._text[self._place : self._place + 1]
        self._place += 1
        if kind in _ESCAPES:
            return ord(_ESCAPES[kind] or kind)
        if kind not in _HEX:
            self._fail(f"\\{kind} is no escape; there are \\n \\r \\t \\\\ \\\" \\[ \\] \\- \\xXX \\uXXXX \\UXXXXXXXX")
        code = int(self._match(_HEX[kind], f"a hexadecimal number behind \\{kind}"), 16)
        if code > LAST or 0xD800 <= code < 0xE000:
            self._fail(f"{code:x} is no character of Unicode")
        return code

    def _token(self) -> _Node:
        negated = self._at("!")
        self._place += negated
        found = re.compile(r"<(?:\[([0-9]{1,9})\]|[^>\r\n]+)>").match(self._text, self._place)
        if found is None:
            self._fail("<text> or <[id]> of a token is expected")
        self._place = found.end()
        identifier = int(found[1]) if found[1] else self._token_id(found[0])
        if identifier is None:
            self._fail(f"{found[0]} is not one token of this model; give its id, as <[id]>")
        return _Token(identifier, negated)

    # Reading.

    def _at(self, *marks: str) -> bool:
        return self._text.startswith(marks, self._place)

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self._text, self._place)
        assert found is not None  # it may be empty
        self._place = found.end()

    def _match(self, pattern: re.Pattern[str], what: str) -> str:
        found = pattern.match(self._text, self._place)
        if found is None:
            self._fail(f"{what} is expected")
        self._place = found.end()
        return found[0]

    def _expect(self, mark: str) -> None:
        if not self._at(mark):
            self._fail(f"{mark} is expected")
        self._place += len(mark)

    def _line(self) -> int:
        return self._text.count("\n", 0, self._place) + 1

    def _fail(self, reason: str) -> NoReturn:
        before = self._text[: self._place].rpartition("\n")[2][-20:]
        raise ValueError(f"line {self._line()}, behind {before!r}: {reason}" if before else f"line {self._line()}: {reason}")


def _inverse(ranges: list[tuple[int, int]]) -> _Ranges:
    """All other characters; surrogates are none."""
    rest, begin = [], 0
    for low, high in sorted([*ranges, (0xD800, 0xDFFF)]):
        if begin < low:
            rest.append((begin, low - 1))
        begin = max(begin, high + 1)
    if begin <= LAST:
        rest.append((begin, LAST))
    return tuple(rest)


def _parts(node: _Node) -> tuple[_Node, ...]:
    if isinstance(node, _Repeat):
        return (node.item,)
    return node.items if isinstance(node, _Sequence | _Choice) else ()


def _names(node: _Node) -> Iterator[_Name]:
    if isinstance(node, _Name):
        yield node
    for part in _parts(node):
        yield from _names(part)


# Writing.


class _Regular:
    """What of a grammar is regular, and what of that shows by itself where it ends. Nodes are known by identity."""

    def __init__(self, rules: _Rules):
        self._rules = rules
        self._lengths: dict[int, int | None] = {}
        self._prefix_free: dict[int, bool] = {}
        self._first: dict[int, _Ranges] = {}

    def is_regular(self, node: _Node) -> bool:
        """Whether a node is no part of a recursion, names no token, and is not too long as an expression."""
        return self._length(node) is not None

    def _length(self, node: _Node) -> int | None:
        """Of the expression, at most."""
        key = id(node)
        if key not in self._lengths:
            self._lengths[key] = None  # while it is looked at: who finds this is in a recursion
            length: int | None = None
            if isinstance(node, _Characters):
                length = 20 * len(node.ranges)
            elif isinstance(node, _Name):
                length = self._length(self._rules[node.name])
            elif not isinstance(node, _Token):
                lengths = [self._length(part) for part in _parts(node)]
                length = None if None in lengths else sum(length + 20 for length in lengths if length is not None)
            self._lengths[key] = None if length is None or length > MAX_EXPRESSION else length
        return self._lengths[key]

    def expression(self, node: _Node) -> str:
        """A regular node in the syntax of Rust's regular expressions."""
        match node:
            case _Characters(ranges):
                return _class(ranges)
            case _Name(name):
                return f"(?:{self.expression(self._rules[name])})"
            case _Sequence(items):
                return "".join(f"(?:{self.expression(item)})" if isinstance(item, _Choice) else self.expression(item) for item in items)
            case _Choice(items):
                return "|".join(map(self.expression, items))
            case _Repeat(item):
                return f"(?:{self.expression(item)}){_times(node)}"
        raise AssertionError(node)

    def is_prefix_free(self, node: _Node) -> bool:
        """Whether a node is regular and none of its texts begins another one, so that each shows where it ends. Found only
        where one character always tells how to go on."""
        key = id(node)
        if key not in self._prefix_free:
            known = False
            if self.is_regular(node):
                match node:
                    case _Characters():
                        known = True
                    case _Name(name):
                        known = self.is_prefix_free(self._rules[name])
                    case _Sequence(items):
                        known = bool(items) and self.run(items, 0) == len(items)
                    case _Choice(items):
                        known = all(map(self.is_prefix_free, items)) and _disjoint([self.first(item) for item in items])
                    case _Repeat(item, low, high):
                        known = low == high and low > 0 and self.is_prefix_free(item)
            self._prefix_free[key] = known
        return self._prefix_free[key]

    def run(self, items: tuple[_Node, ...], begin: int) -> int:
        """The end of the longest run of items that is prefix-free as a whole."""
        end = begin
        for place in range(begin, len(items)):
            if self.is_prefix_free(items[place]):
                end = place + 1
            elif not self._ends_with_what_follows(items, place):
                break
        return end

    def _ends_with_what_follows(self, items: tuple[_Node, ...], place: int) -> bool:
        """Whether an item is a repetition, of which the next character tells whether it goes on."""
        item = items[place]
        if not (isinstance(item, _Repeat) and self.is_prefix_free(item.item)):
            return False
        following: list[tuple[int, int]] = []
        for other in items[place + 1 : place + 1 + LOOK_AHEAD]:
            if self.is_prefix_free(other):
                return _disjoint([self.first(item), _merged([*following, *self.first(other)])])
            if not (isinstance(other, _Repeat) and self.is_prefix_free(other.item)):
                return False
            following += self.first(other)
        return False

    def first(self, node: _Node) -> _Ranges:
        """The characters with which a prefix-free node begins, or one that repeats such a node."""
        key = id(node)
        if key not in self._first:
            match node:
                case _Characters(ranges):
                    found = _merged(ranges)
                case _Name(name):
                    found = self.first(self._rules[name])
                case _Sequence(items):
                    found = self.first_of(items)
                case _Choice(items):
                    found = _merged(ranges for item in items for ranges in self.first(item))
                case _Repeat(item):
                    found = self.first(item)
                case _:
                    raise AssertionError(node)
            self._first[key] = found
        return self._first[key]

    def first_of(self, items: tuple[_Node, ...]) -> _Ranges:
        """The characters with which a run of items begins."""
        found: list[tuple[int, int]] = []
        for item in items:
            found += self.first(item)
            if not isinstance(item, _Repeat) or item.low:
                break
        return _merged(found)


@dataclasses.dataclass
class _Terminal:
    name: str
    first: _Ranges
    nodes: set[int] = dataclasses.field(default_factory=set)  # in which it stands for several characters


class _Lark:
    """A grammar whose terminals are characters, and parts of several characters that nothing else can be taken for.

    A part is a terminal where it is prefix-free, so that the lexer ends it where it has to end, and where no other terminal
    begins with a character with which it may begin, so that nothing else is given up for it. So the rules read the same
    texts; but a JSON string, say, is one step of the parser, and not one for each character.
    """

    def __init__(self, rules: _Rules, regular: _Regular):
        self._rules = rules
        self._regular = regular
        self._names: dict[str, str] = {}  # of the rules that are used
        self._unwritten: list[str] = []
        self._terminals: dict[str, _Terminal] = {}  # by expression
        self._apart: set[int] = set()  # nodes whose parts are written one by one

    def text(self) -> str:
        for round in range(MAX_ROUNDS):
            lines = self._lines()
            mistakable = _mistakable(list(self._terminals.values()))
            if not mistakable:
                break
            last = round == MAX_ROUNDS - 2
            self._apart |= {id(node) for rule in self._rules.values() for node in _all(rule)} if last else mistakable
        return "\n".join(lines) + "\n"

    def _lines(self) -> list[str]:
        self._names, self._unwritten, self._terminals = {}, [], {}
        lines = [f"start: {self._name('root')}"]
        while self._unwritten:
            name = self._unwritten.pop()
            lines.append(f"{self._names[name]}: {self._write(self._rules[name])}")
        return lines + [f"{terminal.name}: /{text}/" for text, terminal in self._terminals.items()]

    def _name(self, name: str) -> str:
        if name not in self._names:
            self._names[name] = f"rule_{len(self._names)}"
            self._unwritten.append(name)
        return self._names[name]

    def _write(self, node: _Node) -> str:
        if isinstance(node, _Characters) or (id(node) not in self._apart and self._regular.is_prefix_free(node)):
            return self._terminal(node, self._regular.expression(node), self._regular.first(node))
        match node:
            case _Token(id_, negated):
                return f"<[{'^' if negated else ''}{id_}]>"
            case _Name(name):
                return self._name(name)
            case _Sequence(items):
                return " ".join(self._items(node, items)) or '""'
            case _Choice(items):
                return " | ".join(map(self._write, items))
            case _Repeat(item):
                return f"({self._write(item)}){_times(node)}"
        raise AssertionError(node)

    def _items(self, node: _Sequence, items: tuple[_Node, ...]) -> Iterator[str]:
        place = 0
        while place < len(items):
            end = place if id(node) in self._apart else self._regular.run(items, place)
            if end - place < 2:
                end = place + 1
                text = self._write(items[place])
                yield f"({text})" if isinstance(items[place], _Choice) else text
            else:
                part = items[place:end]
                yield self._terminal(node, self._regular.expression(_Sequence(part)), self._regular.first_of(part))
            place = end

    def _terminal(self, node: _Node, expression: str, first: _Ranges) -> str:
        terminal = self._terminals.setdefault(expression, _Terminal(f"T_{len(self._terminals)}", first))
        if not isinstance(node, _Characters):
            terminal.nodes.add(id(node))
        return terminal.name


def _mistakable(terminals: list[_Terminal]) -> set[int]:
    """The nodes of several characters with one at their beginning with which another terminal begins, too."""
    starts = sorted((low, high, number) for number, terminal in enumerate(terminals) for low, high in terminal.first)
    shared: set[int] = set()
    ends: list[tuple[int, int]] = []  # the two terminals, at most, that reach farthest of those begun
    for low, high, number in starts:
        for end, other in ends:
            if other != number and low <= end:
                shared |= {number, other}
        best = {other: end for end, other in ends}
        best[number] = max(high, best.get(number, -1))
        ends = sorted(((end, other) for other, end in best.items()), reverse=True)[:2]
    return {node for number in shared for node in terminals[number].nodes}


def _all(node: _Node) -> Iterator[_Node]:
    yield node
    for part in _parts(node):
        yield from _all(part)


def _merged(ranges: Iterable[tuple[int, int]]) -> _Ranges:
    """In order, with no two that touch."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(merged)


def _disjoint(sets: list[_Ranges]) -> bool:
    """Whether no character is in two of them; each is merged."""
    ranges = sorted(range for ranges in sets for range in ranges)
    return all(low > end for (_, end), (low, _) in itertools.pairwise(ranges))


def _class(ranges: _Ranges) -> str:
    """In the syntax of Rust's regular expressions, with nothing else of it within."""
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in ranges) + "]"


def _times(node: _Repeat) -> str:
    known = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((node.low, node.high))
    return known or f"{{{node.low},{'' if node.high is None else node.high}}}"
