"""The prefix index: tokens decide, never a hash; what is forgotten is not found; it grows only with what is published."""

from __future__ import annotations

import pytest

from strategies.prefix import PrefixIndex


class Colliding(int):
    """A token whose hash says nothing."""

    def __hash__(self) -> int:
        return 0


def published(index: PrefixIndex, tokens: list[int], first_page: int, group: int = 0) -> list:
    """Publish all whole pages of `tokens`; their page ids count up from `first_page`."""
    chain: list = []
    while (len(chain) + 1) * 4 <= len(tokens):
        node = index.extend(chain, tokens)
        index.publish(node, group, first_page + len(chain) - 1)
    return chain


def found(index: PrefixIndex, tokens: list[int], most: int = 99) -> list[dict[int, int]]:
    return [node.pages for node in index.chain(tokens, min(most, len(tokens) // 4))]


def test_published_pages_are_found_in_order():
    index = PrefixIndex(4)
    published(index, list(range(12)), 5)
    assert found(index, [*range(12), 99]) == [{0: 5}, {0: 6}, {0: 7}]
    assert found(index, [*range(8), 99, 99, 99, 99]) == [{0: 5}, {0: 6}]
    assert found(index, list(range(12)), most=1) == [{0: 5}]
    assert found(index, [1, 2, 3, 4]) == []


def test_tokens_with_one_hash_are_told_apart():
    index = PrefixIndex(4)
    published(index, [Colliding(n) for n in range(1, 9)], 5)
    assert found(index, [Colliding(n) for n in range(11, 19)]) == []
    assert found(index, [Colliding(n) for n in (*range(1, 5), *range(11, 15))]) == [{0: 5}]
    published(index, [Colliding(n) for n in range(11, 19)], 15)
    assert found(index, [Colliding(n) for n in range(1, 9)]) == [{0: 5}, {0: 6}]
    assert found(index, [Colliding(n) for n in range(11, 19)]) == [{0: 15}, {0: 16}]


def test_equal_page_after_another_parent_is_another_page():
    index = PrefixIndex(4)
    published(index, [9, 9, 9, 9, 1, 2, 3, 4], 5)
    assert found(index, [1, 2, 3, 4]) == []
    assert found(index, [8, 8, 8, 8, 1, 2, 3, 4]) == []
    published(index, [8, 8, 8, 8, 1, 2, 3, 4], 15)
    assert found(index, [8, 8, 8, 8, 1, 2, 3, 4]) == [{0: 15}, {0: 16}]


def test_extended_node_is_not_found_before_it_is_published():
    index = PrefixIndex(4)
    index.extend([], [1, 2, 3, 4])
    assert found(index, [1, 2, 3, 4]) == [] and not index._nodes


def test_second_page_with_the_same_tokens_is_not_published():
    index = PrefixIndex(4)
    published(index, [1, 2, 3, 4], 5)
    node = index.extend([], [1, 2, 3, 4])
    assert index.publish(node, 0, 8) is False
    assert index.publish(node, 1, 8) is True
    assert found(index, [1, 2, 3, 4]) == [{0: 5, 1: 8}]


def test_forgotten_page_is_not_found_and_the_other_group_keeps_its_own():
    index = PrefixIndex(4)
    chain = published(index, [1, 2, 3, 4], 5)
    index.publish(chain[0], 1, 8)
    index.forget(0, 5)
    assert found(index, [1, 2, 3, 4]) == [{1: 8}]
    index.forget(1, 8)
    assert found(index, [1, 2, 3, 4]) == []
    with pytest.raises(KeyError):
        index.forget(1, 8)


@pytest.mark.parametrize("order", [(5, 6, 7), (7, 6, 5), (6, 5, 7), (6, 7, 5)])
def test_chain_is_walked_through_forgotten_pages_until_its_end_is_forgotten_too(order):
    index = PrefixIndex(4)
    published(index, list(range(12)), 5)
    left = {5, 6, 7}
    for page in order:
        index.forget(0, page)
        left.discard(page)
        deepest = max(left, default=4) - 4  # pages up to the deepest one that is left
        assert [pages.get(0) for pages in found(index, list(range(12)))] == [p if p in left else None for p in range(5, 5 + deepest)]
    assert not index._nodes and not index._homes


def test_index_is_no_larger_than_what_is_published():
    index = PrefixIndex(4)
    for start in range(0, 4000, 40):
        published(index, list(range(start, start + 16)), start)
        for page in range(start, start + 4):
            index.forget(0, page)
    assert not index._nodes and not index._homes


def test_renumbered_pages_are_found_under_their_new_ids_and_forgotten_by_them():
    index = PrefixIndex(4)
    published(index, list(range(8)), 5)
    node = index.chain(list(range(8)), 1)[0]
    index.publish(node, 1, 5)
    index.renumber(0, {5: 6, 6: 1})
    assert found(index, list(range(8))) == [{0: 6, 1: 5}, {0: 1}]
    index.forget(0, 6)
    assert found(index, list(range(8))) == [{1: 5}, {0: 1}]


def test_history_that_goes_on_after_its_beginning_was_forgotten_is_found_again():
    index = PrefixIndex(4)
    tokens = list(range(8))
    chain = published(index, tokens[:4], 5)
    index.forget(0, 5)
    index.publish(index.extend(chain, tokens), 0, 6)
    assert found(index, tokens) == [{}, {0: 6}]


def test_history_whose_beginning_was_replaced_publishes_nothing_that_nobody_finds():
    index = PrefixIndex(4)
    tokens = list(range(8))
    chain = published(index, tokens[:4], 5)
    index.forget(0, 5)
    published(index, tokens[:4], 9)
    assert index.publish(index.extend(chain, tokens), 0, 6) is False
    assert found(index, tokens) == [{0: 9}]
    index.forget(0, 9)
    assert not index._nodes and not index._homes
