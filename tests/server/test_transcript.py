"""Text, ids and log-probs of one sample: what goes out when, and what never does."""

from hypothesis import given
from hypothesis import strategies as st

from server.orchestrator.request import Delta, TokenLogprob
from server.orchestrator.transcript import Ending, Transcript
from server.text.tokenizers import ByteTokenizer


def logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, ())


def transcript(*stops: str, min_tokens: int = 0, **options) -> Transcript:
    return Transcript(0, ByteTokenizer().detokenizer(), stops, min_tokens, **options)


def feed(target: Transcript, data: bytes, ending: Ending | None = None) -> list[Delta]:
    """Pushes byte tokens, the last one with ``ending``, until a delta finishes."""
    deltas = []
    for index, token in enumerate(data):
        delta = target.push(token, None, ending if index == len(data) - 1 else None)
        if delta is not None:
            deltas.append(delta)
            if delta.finish_reason:
                break
    return deltas


def joined(deltas: list[Delta]) -> tuple[str, bytes]:
    return "".join(delta.text for delta in deltas), bytes(token for delta in deltas for token in delta.tokens)


def test_without_stops_everything_goes_at_once():
    target = transcript()
    assert target.push(ord("a"), logprob(97), None) == Delta(0, "a", (97,), (logprob(97),))
    assert target.push(0xC3, None, None) == Delta(0, "", (0xC3,))
    assert target.push(0xA9, None, None) == Delta(0, "é", (0xA9,))


def test_eos_is_counted_and_not_shown():
    target = transcript()
    target.push(ord("a"), None, None)
    assert target.push(257, None, Ending("stop", hidden=True)) == Delta(0, "", (), (), "stop", None)
    assert target.count == 2


def test_a_stop_token_is_named():
    delta = transcript().push(120, None, Ending("stop", stop_reason=120, hidden=True))
    assert (delta.text, delta.tokens, delta.stop_reason) == ("", (), 120)


def test_length_shows_the_last_token_and_what_waited():
    deltas = feed(transcript("xyz"), b"axy", Ending("length"))
    assert joined(deltas) == ("axy", b"axy")
    assert deltas[-1].finish_reason == "length"


def test_a_truncated_character_comes_out_at_the_end():
    deltas = feed(transcript(), b"a\xc3", Ending("length"))
    assert joined(deltas) == ("a�", b"a\xc3")


def test_stop_string_across_tokens_hides_its_ids_too():
    deltas = feed(transcript("lo w"), b"hello world")
    assert joined(deltas) == ("hel", b"hel")
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "lo w")


def test_a_false_start_is_only_late():
    deltas = feed(transcript("lol"), b"hello", Ending("length"))
    assert joined(deltas) == ("hello", b"hello")
    assert [delta.text for delta in deltas] == ["h", "e", "l", "lo"]


def test_ids_of_a_character_wait_for_it_with_stops():
    assert joined(feed(transcript("é"), "aéb".encode())) == ("a", b"a")


def test_stop_string_in_the_last_token_wins_over_length():
    deltas = feed(transcript("b"), b"ab", Ending("length"))
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason, deltas[-1].text) == ("stop", "b", "")


def test_stop_strings_wait_for_min_tokens():
    assert joined(feed(transcript("a", min_tokens=3), b"aaaa")) == ("aa", b"aa")
    assert joined(feed(transcript("ab", min_tokens=2), b"abab")) == ("ab", b"ab")


def test_text_can_be_for_stops_only():
    assert joined(feed(transcript("c", show_text=False), b"abcd")) == ("", b"ab")


def test_without_text_and_stops_no_detokenizer_is_needed():
    target = Transcript(0, None, (), 0)
    assert target.push(300, None, None) == Delta(0, "", (300,))


def test_max_tokens_0_ends_without_a_token():
    assert transcript().end("length") == Delta(0, "", (), (), "length")


@given(st.text("abé", min_size=1, max_size=20), st.lists(st.text("abé", min_size=1, max_size=3), max_size=3))
def test_nothing_is_lost_and_nothing_of_a_match_is_sent(text, stops):
    data = text.encode()
    deltas = feed(transcript(*stops), data, Ending("length"))
    got, ids = joined(deltas)
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    assert got == expected
    assert ids == expected.encode()
    assert deltas[-1].finish_reason == ("stop" if ends else "length")
