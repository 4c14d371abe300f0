"""The choice among upstreams, by hand: blocks of 32 tokens, a sequence costs 32 tokens, a wait for a slot 1024, an adapter 1024
(see the docstring of ``server/proxy/policy.py``)."""

from __future__ import annotations

import itertools

import pytest

from server.proxy.policy import (
    ADAPTER_TOKENS,
    REMEMBERED_BLOCKS,
    SEQUENCE_TOKENS,
    WAIT_TOKENS,
    Assignment,
    Policy,
    Prompt,
    Replica,
    Standing,
    describe,
)


def replicas(*names, slots=8):
    made = [Replica(name) for name in names]
    for replica in made:
        replica.state, replica.slots = "ready", slots
    return made


def tokens(count, first=0):
    return list(range(first, first + count))


def test_blocks_of_a_prompt():
    whole = describe(tokens(100))
    assert (len(whole.blocks), whole.tokens) == (3, 100)
    assert describe(tokens(64)).blocks == whole.blocks[:2]
    assert describe([7, *tokens(99, first=1)]).blocks[1] != whole.blocks[1]  # a block is all that comes before it, too
    assert not set(describe(tokens(100), adapter="poet").blocks) & set(whole.blocks)
    assert describe("a" * 300).blocks == describe("a" * 299).blocks  # 128 characters a block
    assert (len(describe("a" * 300).blocks), describe("a" * 300).tokens) == (2, 75)
    assert describe("\ud800" * 128).blocks  # what no encoding has is still a prompt
    assert describe("").blocks == describe([]).blocks == ()


def test_cost_is_the_work_before_the_first_token():
    (replica,) = replicas("a", slots=2)
    assert replica.cost(Prompt(tokens=100)) == 100
    first = Assignment(replica, describe(tokens(100)))
    assert replica.cost(Prompt(tokens=50)) == 50 + 100 + SEQUENCE_TOKENS
    assert replica.cost(describe(tokens(100))) == (100 - 96) + 100 + SEQUENCE_TOKENS  # three blocks are there
    first.answered()
    assert replica.cost(Prompt(tokens=50)) == 50 + SEQUENCE_TOKENS
    second = Assignment(replica, describe(tokens(100)))
    assert second.cached == 96
    assert replica.cost(Prompt(tokens=50)) == 50 + 4 + 2 * SEQUENCE_TOKENS + WAIT_TOKENS  # both slots are taken
    second.end()
    second.end()
    first.end()
    assert (replica.sequences, replica.unanswered) == (0, 0)
    assert replica.cost(Prompt(tokens=50, adapter="poet")) == 50 + ADAPTER_TOKENS


def test_others_count_as_far_as_they_are_not_this_proxys():
    (replica,) = replicas("a")
    Assignment(replica, Prompt(samples=3))
    replica.heard(running=4, waiting=1, slots=4)
    assert replica.load == 5 / 4
    replica.heard(running=0, waiting=0, slots=4)  # it has not got them yet
    assert replica.load == 3 / 4


def test_the_least_outstanding_work_goes_first():
    one, two = replicas("a", "b")
    Assignment(one, Prompt(tokens=1000))
    Assignment(two, Prompt(tokens=10)), Assignment(two, Prompt(tokens=10))
    assert Policy().choose([one, two], Prompt(tokens=10), 0.0) is two  # two short prompts are less than a long one


def test_short_prompts_take_turns():
    policy, three = Policy(), replicas("a", "b", "c")
    chosen = [policy.choose(three, Prompt(tokens=5), 0.0) for _ in range(6)]
    assert chosen == [*three, *three]


def test_the_same_beginning_goes_to_the_same_place_until_that_costs_more():
    policy, three = Policy(), replicas("a", "b", "c", slots=100)
    beginning = tokens(320)  # ten blocks
    home = policy.choose(three, describe(beginning), 0.0)
    Assignment(home, describe(beginning)).end()
    chosen = []
    for question in range(12):
        prompt = describe([*beginning, *tokens(20, first=1000 * question)])
        replica = policy.choose(three, prompt, 0.0)
        Assignment(replica, prompt).answered()  # they run on
        chosen.append(replica)
    # 320 tokens of prefill are ten sequences: with ten running at home, another place is as good, with eleven better.
    assert chosen[:10] == [home] * 10
    assert chosen[11] is not home
    other = chosen[11]
    assert other.matched(describe(beginning)) == 320  # the beginning lives there too from now on


def test_a_full_upstream_is_not_waited_for_while_another_has_a_slot():
    policy, (one, two) = Policy(), replicas("a", "b", slots=1)
    prompt = describe(tokens(640))
    home = policy.choose([one, two], prompt, 0.0)
    Assignment(home, prompt).answered()
    assert policy.choose([one, two], prompt, 0.0) is not home


def test_proxies_that_know_nothing_agree_and_spread():
    names = ["a:1", "b:1", "c:1"]
    chosen = {}
    for order in itertools.permutations(names):
        policy, made = Policy(), replicas(*order)
        for start in range(30):
            replica = policy.choose(made, describe(tokens(64, first=start)), 0.0)
            assert chosen.setdefault(start, replica.address) == replica.address
    counts = [list(chosen.values()).count(name) for name in names]
    assert min(counts) >= 4, counts


def test_an_adapter_goes_where_it_was_used_and_only_where_it_is():
    policy, three = Policy(), replicas("a", "b", "c")
    home = policy.choose(three, describe(tokens(5), "poet"), 0.0)
    Assignment(home, describe(tokens(5), "poet")).end()
    for _ in range(5):
        assert policy.choose(three, describe(tokens(40, first=9), "poet"), 0.0) is home
    home.adapters = frozenset({"lawyer"})  # it was unloaded there
    assert policy.choose(three, describe(tokens(5), "poet"), 0.0) is not home
    one, two, three_ = three
    one.adapters, two.adapters, three_.adapters = frozenset(), frozenset({"poet"}), frozenset()
    Assignment(two, Prompt(tokens=5000))
    assert policy.choose(three, describe(tokens(5), "poet"), 0.0) is two


@pytest.mark.parametrize(
    ("state", "standing"),
    [("ready", 0), ("connecting", 1), ("loading", 2), ("warming", 2), ("failed", 3), ("unreachable", 3), ("draining", 4)],
)
def test_standing_follows_the_state(state, standing):
    replica = Replica("a")
    replica.state = state
    assert replica.standing(0.0) == standing


def test_who_is_out_gets_nothing_while_anybody_better_is_there_even_if_that_one_refuses():
    policy, (one, two) = Policy(), replicas("a", "b")
    for _ in range(3):
        one.ejection.failed(0.0)
    assert policy.choose([one, two], Prompt(), 0.5) is two
    assert policy.choose([one, two], Prompt(), 0.5, tried={two}) is None  # its queue is full: better than a dead one
    two.state = "unreachable"
    assert policy.choose([one, two], Prompt(), 0.5, tried={two}) is one  # the last resort
    two.state = "draining"
    assert policy.choose([one, two], Prompt(), 0.5) is one


def test_on_trial_one_request_at_a_time():
    policy, (one, two) = Policy(), replicas("a", "b")
    for _ in range(3):
        one.ejection.failed(0.0)
    Assignment(two, Prompt(tokens=5000))
    assert policy.choose([one, two], Prompt(tokens=5), 1.0) is one
    trial = Assignment(one, Prompt(tokens=5))
    assert one.standing(1.0) == Standing.OUT
    assert policy.choose([one, two], Prompt(tokens=5), 1.0) is two
    one.ejection.answered(1.1)
    trial.answered()
    assert policy.choose([one, two], Prompt(tokens=5), 1.1) is one


def test_what_was_sent_is_forgotten_in_time_and_when_it_goes_away():
    (replica,) = replicas("a")
    old, new = describe(tokens(96)), describe(tokens(96, first=1))
    replica.remember(old)
    replica.remember(new)
    for count in range(REMEMBERED_BLOCKS // 1000 + 1):
        replica.remember(describe(tokens(32_000, first=10_000 * count)))
    replica.remember(old)
    assert len(replica._blocks) == REMEMBERED_BLOCKS
    assert (replica.matched(old), replica.matched(new)) == (96, 0)
    replica.heard(0, 0, 8, pages=2)
    replica.remember(new)
    assert (replica.matched(old), replica.matched(new)) == (0, 64)  # the room of its pages, and beginnings stay longest
    replica.forget()
    assert replica.matched(new) == 0
