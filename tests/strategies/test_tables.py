"""Page tables: they grow in both directions, and a row that is used again is clean."""

from __future__ import annotations

import numpy as np
import pytest

from strategies.pages import SCRATCH
from strategies.tables import PageTables


def test_tables_grow_in_rows_and_width_without_losing_an_entry():
    tables = PageTables()
    want = {}
    for sid in range(13):
        tables.open(sid)
        want[sid] = [100 * sid + page + 1 for page in range(3 * sid)]
        for page in want[sid]:
            tables.append(sid, [page])
    for sid, pages in want.items():
        assert tables.count(sid) == len(pages) and tables.mapped(sid) == pages
    gathered = tables.gather(list(want), 40)
    assert gathered.shape == (13, 40) and gathered.dtype == np.int32
    for row, pages in zip(gathered.tolist(), want.values(), strict=True):
        assert row == pages + [SCRATCH] * (40 - len(pages))


def test_gathering_past_the_widest_table_names_the_scratch_page():
    tables = PageTables()
    tables.open(0)
    tables.append(0, [5, 6])
    assert tables.gather([0], 100).tolist() == [[5, 6] + [SCRATCH] * 98]


def test_gathering_gives_a_copy():
    tables = PageTables()
    tables.open(0)
    tables.append(0, [5])
    tables.gather([0], 1)[0, 0] = 9
    assert tables.page(0, 0) == 5


@pytest.mark.parametrize("leave", ["close", "cut", "clear"])
def test_reused_row_holds_nothing_of_its_previous_owner(leave):
    tables = PageTables()
    tables.open(1)
    tables.append(1, [11, 12, 13, 14, 15])
    if leave == "cut":
        assert tables.cut(1, 2) == [13, 14, 15]
    if leave == "clear":
        assert tables.clear(1, 0, 3) == [11, 12, 13]
    tables.close(1)
    tables.open(2)
    tables.append(2, [21, 22])
    assert tables.gather([2], 8).tolist() == [[21, 22] + [SCRATCH] * 6]


def test_cutting_and_growing_again_leaves_no_stale_entry():
    tables = PageTables()
    tables.open(0)
    tables.append(0, [1, 2, 3, 4])
    assert tables.cut(0, 1) == [2, 3, 4] and tables.count(0) == 1
    tables.append(0, [9])
    assert tables.gather([0], 5).tolist() == [[1, 9, SCRATCH, SCRATCH, SCRATCH]]
    assert tables.cut(0, 5) == [] and tables.count(0) == 2


def test_cleared_entries_keep_the_numbering_and_are_cleared_once():
    tables = PageTables()
    tables.open(0)
    tables.append(0, [1, 2, 3, 4])
    assert tables.clear(0, 1, 3) == [2, 3]
    assert tables.clear(0, 1, 9) == [4]
    assert tables.clear(0, 3, 2) == []
    assert (tables.count(0), tables.mapped(0), tables.page(0, 2)) == (4, [1], SCRATCH)


def test_renumbering_reaches_every_table_and_leaves_gaps_and_spare_rows_alone():
    tables = PageTables()
    for sid in range(3):
        tables.open(sid)
    tables.append(0, [9, 4, 7])
    tables.append(1, [9])
    tables.append(2, [3])
    tables.clear(0, 1, 2)
    tables.close(2)
    tables.renumber({7: 1, 9: 2})
    tables.open(3)
    assert tables.gather([0, 1, 3], 3).tolist() == [[2, SCRATCH, 1], [2, SCRATCH, SCRATCH], [SCRATCH] * 3]
    for sid in (0, 1):
        tables.close(sid)
    tables.renumber({})
    assert tables.gather([3], 9).tolist() == [[SCRATCH] * 9]


@pytest.mark.parametrize("index", [-1, 2, 7])
def test_looking_past_the_end_is_refused(index):
    tables = PageTables()
    tables.open(0)
    tables.append(0, [1, 2])
    with pytest.raises(IndexError, match="sequence 0 has 2 pages"):
        tables.page(0, index)
    with pytest.raises(IndexError, match="sequence 0 has 2 pages"):
        tables.set(0, index, 5)
