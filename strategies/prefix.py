"""Which published pages hold which tokens: a chain of whole pages from position 0, compared by the tokens themselves.

Standard library only. A hash is never trusted: the key of a page is its parent's identity and its own token ids, and
Python's dict compares them (two prompts that collide under any hash stay apart). It does not know how pages are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count


@dataclass(eq=False)
class Node:
    """One whole page of some history, after `parent`. `pages` maps a group number to the page id that holds these tokens there.

    A node is in the index while it has pages or `children` there: a windowed group needs only the last pages of a chain.
    """

    id: int
    parent: Node | None
    key: tuple[int, tuple[int, ...]]
    pages: dict[int, int] = field(default_factory=dict)
    children: int = 0


ROOT = -1


class PrefixIndex:
    """Published pages by history. As large as what is published and the chains that it hangs on; a node in it has its parent in it."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._nodes: dict[tuple[int, tuple[int, ...]], Node] = {}
        self._homes: dict[tuple[int, int], Node] = {}  # (group, page id) -> the node that it is published under
        self._ids = count()

    def chain(self, tokens: Sequence[int], most: int) -> list[Node]:
        """Nodes of the leading whole pages of `tokens`, at most `most`, as far as they are known."""
        nodes: list[Node] = []
        parent = ROOT
        for page in range(most):
            node = self._nodes.get((parent, self._slice(tokens, page)))
            if node is None:
                break
            nodes.append(node)
            parent = node.id
        return nodes

    def extend(self, chain: list[Node], tokens: Sequence[int]) -> Node:
        """The node of the next whole page of `tokens` after `chain`, made when new; appended to `chain`, findable once published."""
        parent = chain[-1] if chain else None
        key = (ROOT if parent is None else parent.id, self._slice(tokens, len(chain)))
        node = self._nodes.get(key)
        if node is None:
            node = Node(next(self._ids), parent, key)
        chain.append(node)
        return node

    def publish(self, node: Node, group: int, page: int) -> bool:
        """Publish `page` as this node's page of `group`; False when another page already holds these tokens there."""
        if group in node.pages or not self._enter(node):
            return False
        node.pages[group] = page
        self._homes[group, page] = node
        return True

    def forget(self, group: int, page: int) -> None:
        """`page` is about to be handed out for something else."""
        node = self._homes.pop((group, page))
        del node.pages[group]
        while node is not None and not node.pages and not node.children:
            del self._nodes[node.key]
            node = node.parent
            if node is not None:
                node.children -= 1

    def _enter(self, node: Node) -> bool:
        """Make `node` and the part of its chain that was forgotten findable; False when a newer chain took its place."""
        absent = []
        while node is not None and self._nodes.get(node.key) is not node:
            if node.key in self._nodes:
                return False
            absent.append(node)
            node = node.parent
        for each in absent:
            self._nodes[each.key] = each
            if each.parent is not None:
                each.parent.children += 1
        return True

    def renumber(self, group: int, moved: dict[int, int]) -> None:
        """Every published page id of `group` is now called moved[id]."""
        homes = {(number, page): node for (number, page), node in self._homes.items() if number != group}
        for (number, page), node in self._homes.items():
            if number == group:
                node.pages[group] = moved[page]
                homes[group, moved[page]] = node
        self._homes = homes

    def _slice(self, tokens: Sequence[int], page: int) -> tuple[int, ...]:
        return tuple(tokens[page * self._page_size : (page + 1) * self._page_size])
