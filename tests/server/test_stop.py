"""Stop strings: by hand, and against a search in the whole text for every way to cut it."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from server.text.stop_strings import StopMatcher


def run(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """What is sent, piece by piece and at last by the flush, and what matched."""
    matcher = StopMatcher(stops)
    sent = []
    for piece in pieces:
        result = matcher.push(piece)
        sent.append(result.text)
        if result.matched is not None:
            return sent, result.matched
    sent.append(matcher.flush())
    return sent, None


def test_inside_one_piece():
    assert run(["END"], ["abcENDdef"]) == (["abc"], "END")


def test_across_pieces():
    assert run(["END"], ["abcE", "N", "Dxx"]) == (["abc", "", ""], "END")


def test_false_start_is_released():
    assert run(["END"], ["abE", "Nx", "E"]) == (["ab", "ENx", "", "E"], None)


def test_false_start_that_contains_the_start():
    assert run(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")


def test_first_complete_wins():
    assert run(["lo", "hell"], ["hello"]) == ([""], "hell")
    assert run(["c", "bcd"], ["abcd"]) == (["ab"], "c")
    assert run(["bc", "abc"], ["xabc"]) == (["x"], "abc")


def test_at_the_very_start_and_end():
    assert run(["a"], ["abc"]) == ([""], "a")
    assert run(["c"], ["ab", "c"]) == (["ab", ""], "c")


def test_no_stops_hold_nothing_back():
    assert run([], ["ab", "c"]) == (["ab", "c", ""], None)


def test_sent_counts_characters():
    matcher = StopMatcher(["é!"])
    matcher.push("aé")
    assert matcher.sent == 1
    matcher.push("b")
    assert matcher.sent == 3


LETTERS = st.text("abc", max_size=24)


@given(LETTERS, st.lists(st.text("abc", min_size=1, max_size=4), max_size=4), st.lists(st.integers(0, 24), max_size=8))
def test_whatever_the_cut_the_outcome_is_that_of_the_whole_text(text, stops, cuts):
    borders = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[begin:end] for begin, end in itertools.pairwise(borders)]
    sent, matched = run(stops, pieces)
    # The oracle: the shortest beginning of the text that ends with a stop string, the longest such stop removed.
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            assert ("".join(sent), matched) == (text[: end - len(longest)], longest)
            return
    assert ("".join(sent), matched) == (text, None)
