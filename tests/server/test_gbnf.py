"""Grammars in GBNF: texts that match or do not, worked out by hand from llama.cpp's description of its grammars; and random
grammars against a recogniser that tries everything."""

from __future__ import annotations

import itertools
import json

import pytest
from guide_harness import allows
from hypothesis import given, settings
from hypothesis import strategies as st

from server.errors import InvalidRequest
from server.text import gbnf

JSON = r"""
# any value, and spaces where people put them
root   ::= value
value  ::= (object | list | string | number | "true" | "false" | "null") ws
object ::= "{" ws (
    pair              # the first
    ("," ws pair)*
  )? "}"
pair   ::= string ws ":" ws value
list   ::= "[" ws ( value ("," ws value)* )? "]"
string ::= "\"" ([^"\\\x00-\x1f] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}))* "\""
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})?
ws     ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = r"""
root ::= (sum " = " number "\n")+
sum ::= product ([-+] product)*
product ::= factor ([*/] factor)*
factor ::= number | name | "(" sum ")"
number ::= [0-9]+
name ::= [a-z] [a-z0-9_]*
"""
CODE = r"""
root ::= (statement)*
statement ::= type_name " " name " = " value ";" | name "(" arguments? ");" | "return " value ";" | loop | note
loop ::= "while (" name ") {" statement* "}"
type_name ::= "int" | "float"
name ::= [a-z_] [a-z_0-9]*
value ::= name | [0-9]+ | name "(" arguments? ")" | "-" value
arguments ::= value (", " value)*
note ::= "/*" ([^*] | "*" [^/])* "*/"
"""
VALUES = [{}, [], {"a": [1, -2.5, 1e-7, True, None]}, "x\"\\\n\u00e9\U0001f389", 0, {"": {"b": ["c", {"d": ""}]}}]
CASES = [
    # (grammar, good, bad)
    ('root ::= "a" "b"', ["ab"], ["a", "abb", "a b"]),
    ('root ::= "a" | "b" "c" |', ["a", "bc", ""], ["b", "ac"]),
    ("root ::= [a-c]+ [^a-z] .", ["abc5\n", "a1x", "aÜ🎉"], ["5x", "aaa"]),
    ('root ::= "x"{2} [0-9]{1,3} [a]{0,2} "z"{2,}', ["xx1zz", "xx123aazzz"], ["x1zz", "xx1234zz", "xx1aaazz", "xx1z"]),
    ('root ::= ("a" "b"?){ 2 , 3 }', ["aa", "abab", "aba", "aaa"], ["a", "aaaa"]),
    ('root ::= "ab"* "c"?', ["", "ababc", "c"], ["abb", "cc"]),
    ('root ::= "a"?+', ["", "aaa"], ["b"]),
    # The longest match is not always the right one.
    ('root ::= [a-z]* "x"', ["x", "abx", "xx"], ["ab", ""]),
    ('root ::= rest "x" | "(" root ")"\nrest ::= [a-z]*', ["abx", "((xx))"], ["ab", "(ab)", "(x"]),
    ('root ::= a\na ::= "ab" "c" | "a" "bd" | "(" a ")"', ["abc", "abd", "(abd)"], ["ab"]),
    ('root ::= word ("," word)* | "[" root "]"\nword ::= "in" | "int" | [a-z]{2}', ["in,int,ab", "[[xy]]"], ["inn", "i"]),
    # Names, lines, comments.
    ('root::=a-b|c_D|E2\na-b::="1"\nc_D ::= "2" # "3"\n\n# "4"\nE2 ::="5"', ["1", "2", "5"], ["3", "4"]),
    ('# first\r\nroot ::= ( # one\r\n  "a"\r\n  "b" | # two\r\n  "c"\r\n)\r\n', ["ab", "c"], ["a"]),
    ('root ::= "a" |\n  "b"\n', ["a", "b"], ["ab"]),
    ('root ::= "a"\n  | "b"\n  | x\nx ::= "c"', ["a", "b", "c"], ["ab"]),
    ('root ::= "a"\nroot ::= "b"', ["b"], ["a"]),  # the last one counts
    ('root ::= "#" [#] # comment\n', ["##"], ["#"]),
    # Characters.
    (r'root ::= "\x41\u00e9\U0001F389\t\"\\\[\]"', ['Aé🎉\t"\\[]'], ["A"]),
    (r"root ::= [\x41\u00e9\-\]\[^-]", list("Aé-][^"), ["B", "\\", "x"]),
    ("root ::= [^\\n\\u2028]+", ["é x\t"], ["a\n", "\u2028"]),
    ("root ::= [ぁ-ゟ、]+ [a-]", ["ひらがな、-"], ["ア-", "ひb"]),
    (r'root ::= [/&~.+*?(){}|$^"\-]+ "/"', ['/&~.+*?(){}|$^"-/'], ["a/"]),
    (r'root ::= [--/]{3}', ["-./"], ["---0", ",,,"]),
    # Whole languages.
    (JSON, [*map(json.dumps, VALUES), json.dumps(VALUES, indent=4), '"\\u00E9\\/"'], ['{"a":}', "[1,]", "01", '"\n"', "{} {}", "1e"]),
    (SUMS, ["a+b*c = 3\n", "(x_1+22)/3-y = 07\n1 = 1\n"], ["a+ = 3\n", "a+b = c\n", "(a = 1\n", "1 = 1"]),
    (
        CODE,
        ["int a = 5;f(a, -g(1));return a;", "while (a) {/* * // */int integer = int_;}", ""],
        ["int a = ;", "return5;", "/* */ */", "while (a) {"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("grammar", "good", "bad"), CASES, ids=lambda value: str(value)[:40].replace("\n", " "))
def test_what_a_grammar_matches(grammar, good, bad):
    assert gbnf.is_gbnf(grammar)
    assert [text for text in good if not allows("guided_grammar", grammar, text)] == []
    assert [text for text in bad if allows("guided_grammar", grammar, text)] == []


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [  # 256 is the byte tokenizer's <|bos|>
        ('root ::= <|bos|> "a"', [256, 97], [*b"<|bos|>a"]),
        ('root ::= (<[256]> | "b")+ "a"', [256, 98, 256, 97], [97]),
        ('root ::= "(" !<|bos|>* <[256]> ")"', [40, 97, 98, 256, 41], [40, 256, 256, 41]),
        ('root ::= !<[97]> "a"', [98, 97], [97, 97]),
    ],
)
def test_tokens(grammar, good, bad):
    assert allows("guided_grammar", grammar, good) and not allows("guided_grammar", grammar, bad)


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a"\nb ::= x y', r"line 2: there is no rule x"),
        ('start ::= "a"', "there is no rule root"),
        ('root ::= "a"\n\nb := "c"', "line 3, behind 'b ': ::= is expected"),
        ('root ::= "a"\nb ::= "c', 'line 2: the text that begins here has no closing "'),
        ("root ::= x\nx ::= [a-", "line 2, behind .*: the grammar ends within characters"),
        ("root ::= [ab\n", r"line 1: the characters that begin here have no closing \]"),
        ("root ::= [z-a]", "line 1, .*: z-a is no range"),
        ("root ::= []", r"line 1, .*: there is no character between"),
        (r'root ::= "\d"', r"line 1, .*: \\d is no escape"),
        (r'root ::= "\x4"', "line 1, .*: a hexadecimal number"),
        (r'root ::= "\ud800"', "line 1, .*: d800 is no character"),
        (r'root ::= "\U00110000"', "line 1, .*: 110000 is no character"),
        ('root ::= (\n"a"\n', r"line 3: \) is expected"),
        ('root ::= "a")', r"line 1, .*: the end of the line"),
        ("root ::= *", "line 1, .*: there is nothing to repeat"),
        ('root ::= "a"{2,1}', r"line 1, .*: \{2,1\} is no range"),
        ('root ::= "a"{,1}', "line 1, .*: a number of repetitions"),
        ('root ::= "a"{2001}', "line 1, .*: at most 2000"),
        ('root ::= "a"{1', "line 1, .*: } is expected"),
        ("root ::= <think>", "line 1, .*: <think> is not one token of this model"),
        ('root ::= <[9999]> "a"', "9999"),
        ("root ::= <", "line 1, .*: <text> or"),
        ("root ::= root", "matches no text"),
        ("root ::= " + "(" * 5000, "nested too deeply"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_told_with_its_line(grammar, message):
    with pytest.raises(InvalidRequest, match="guided_grammar cannot be compiled: .*" + message) as caught:
        allows("guided_grammar", grammar, "")
    assert len(caught.value.message) < 400


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('start: "a" b\n\nb: "x', "line 3: lexer error"),
        ("start: a\na: (b\n", "line [23]: "),
        ('start: "a" b', "line 1: unknown name"),
        ("start: /(/", "line 1: invalid regex"),
        ('foo: "a"', "no start rule found"),
    ],
)
def test_what_is_wrong_with_larks_syntax_too(grammar, message):
    assert not gbnf.is_gbnf(grammar)
    with pytest.raises(InvalidRequest, match="guided_grammar cannot be compiled: .*" + message):
        allows("guided_grammar", grammar, "")


def test_the_two_are_told_apart():
    assert gbnf.is_gbnf('# start: "x"\n\troot::= "a"') and gbnf.is_gbnf('x ::= "y"\nroot ::= x')
    assert not gbnf.is_gbnf('start: "root ::= x"\n// root ::= "a"') and not gbnf.is_gbnf("")
    assert allows("guided_grammar", 'start: "root ::= x"', "root ::= x")


# Against a recogniser that tries everything. A grammar is a list of nodes, rule 0 first: a text, (operator, nodes...).


def written(node):
    match node:
        case str():
            return json.dumps(node)
        case ("rule", number):
            return f"r{number}"
        case ("class", characters):
            return f"[{characters}]"
        case ("repeat", item, mark):
            return f"({written(item)}){mark}"
        case ("choice", *items):
            return "(" + " | ".join(map(written, items)) + ")"
        case ("sequence", *items):
            return "(" + " ".join(map(written, items)) + ")"


def ends(node, text, begin, known):
    """Where a node's texts that begin at a place of the text end, as far as is known of the rules."""
    match node:
        case str():
            return {begin + len(node)} if text.startswith(node, begin) else set()
        case ("rule", number):
            return known.get((number, begin), set())
        case ("class", characters):
            return {begin + 1} if text[begin : begin + 1] in list(characters) else set()
        case ("choice", *items):
            return set().union(*(ends(item, text, begin, known) for item in items))
        case ("sequence", *items):
            places = {begin}
            for item in items:
                places = set().union(*(ends(item, text, place, known) for place in places))
            return places
        case ("repeat", item, mark):
            low, high = {"*": (0, 9), "+": (1, 9), "?": (0, 1), "{2}": (2, 2), "{1,2}": (1, 2)}[mark]
            places, found = {begin}, set()
            for count in range(high + 1):
                if count >= low:
                    found |= places
                places = set().union(*(ends(item, text, place, known) for place in places))
            return found


def matches(rules, text):
    known = {}
    while True:  # until nothing more is found
        found = {(n, place): ends(rule, text, place, known) for n, rule in enumerate(rules) for place in range(len(text) + 1)}
        if found == known:
            return len(text) in known[0, 0]
        known = found


NODES = st.recursive(
    st.sampled_from(["a", "b", "ab", "ba", ("class", "ab"), ("class", "bc"), "c", "", ("rule", 0), ("rule", 1), ("rule", 2)]),
    lambda nodes: st.one_of(
        st.tuples(st.just("repeat"), nodes, st.sampled_from(["*", "+", "?", "{2}", "{1,2}"])),
        st.tuples(st.just("choice"), nodes, nodes),
        st.tuples(st.just("sequence"), nodes, nodes),
        st.tuples(st.just("sequence"), nodes, nodes, nodes),
    ),
    max_leaves=6,
)
TEXTS = ["".join(letters) for length in range(5) for letters in itertools.product("abc", repeat=length)]


@settings(deadline=None, derandomize=True, max_examples=120)
@given(st.lists(NODES, min_size=3, max_size=3), st.lists(st.sampled_from(TEXTS), min_size=12, max_size=12))
def test_random_grammars_match_what_they_should(rules, some):
    grammar = "\n".join(["root ::= r0", *(f"r{number} ::= {written(rule)}" for number, rule in enumerate(rules))])
    texts = [*TEXTS[:13], *some]  # all of up to two letters
    want = [text for text in texts if matches(rules, text)]
    try:
        assert [text for text in texts if allows("guided_grammar", grammar, text)] == want
    except InvalidRequest as error:
        assert "matches no text" in error.message and not want  # noqa: PT017 (whether it is refused depends on the grammar)
