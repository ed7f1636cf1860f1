"""What people type, and what Hydra is handed for it."""

from __future__ import annotations

import pytest

from harness.arguments import GROUPS, hydra_arguments
from harness.errors import UserError

TEXT = frozenset({"data.path", "model.source"})


@pytest.mark.parametrize("typed", ["strategy=paged", "+strategy=paged", "++strategy=paged"])
def test_a_group_may_be_typed_with_any_number_of_pluses(typed):
    assert hydra_arguments([typed], TEXT) == ["strategy=paged"]


def test_a_key_is_always_passed_on_so_that_one_check_sees_them_all():
    assert hydra_arguments(["seed=3", "+strategy.page_size=8"], TEXT) == ["++seed=3", "++strategy.page_size=8"]


def test_the_reference_is_chosen_like_a_strategy():
    assert hydra_arguments(["reference=none", "reference.slab=max"], TEXT) == ["strategy@reference=none", "++reference.slab=max"]


def test_hydras_own_keys_are_left_alone():
    own = ["hydra.verbose=true", "hydra/launcher=joblib", "~data", "experimental", "strategy@reference=none"]
    assert hydra_arguments(own, TEXT) == own


def test_flags_and_their_values_are_kept_and_put_where_the_parser_wants_them():
    assert hydra_arguments(["-m", "strategy=paged", "--config-dir", "a=b", "seed=1"], TEXT) == [
        "strategy=paged",
        "++seed=1",
        "-m",
        "--config-dir",
        "a=b",
    ]


@pytest.mark.parametrize("value", ["epoch=9-step=8.ckpt", "1e-4", "a, b", "on", "it's", 'say "x"', "back\\slash", "end\\", "${x}", "[a]"])
def test_a_text_reaches_the_configuration_letter_for_letter(value):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    (argument,) = hydra_arguments([f"data.path={value}"], TEXT)
    assert OverridesParser.create().parse_override(argument).value() == value


def test_null_is_not_made_a_text():
    assert hydra_arguments(["data.path=null"], TEXT) == ["++data.path=null"]


def test_a_sweep_over_texts_splits_at_commas_and_quotes_each():
    assert hydra_arguments(["-m", "data.path=a=1.txt,'b,c.txt',d"], TEXT)[0] == '++data.path="a=1.txt",\'b,c.txt\',"d"'
    assert hydra_arguments(["-m", "data.path=choice(a,b)"], TEXT)[0] == "++data.path=choice(a,b)"


@pytest.mark.parametrize("group", GROUPS)
def test_a_list_of_group_members_is_refused_because_it_would_merge_them(group):
    with pytest.raises(UserError, match=f"{group}=\\[a,b\\] would merge them into one.*-m {group}=a,b"):
        hydra_arguments([f"+{group}=[a,b]"], TEXT)


@pytest.mark.parametrize("value", ["null", ""])
def test_choosing_nothing_is_refused(value):
    with pytest.raises(UserError, match="chooses nothing"):
        hydra_arguments([f"strategy={value}"], TEXT)


def test_a_sweep_agents_values_keep_their_types():
    from hydra.core.override_parser.overrides_parser import OverridesParser

    rendered = [
        "seed=3",
        "workload.temperature=0.0001",
        "data.path=a b.txt",
        "workload.ignore_eos=True",
        "list=[1, 2]",
        "model.source=1e-4",
    ]
    values = [parsed.value() for parsed in OverridesParser.create().parse_overrides(hydra_arguments(rendered, TEXT))]
    assert values == [3, 1e-4, "a b.txt", True, [1, 2], "1e-4"]


@pytest.mark.parametrize("typed", ["--seed=3", "-seed=3", "--workload.batch=2"])
def test_a_key_with_hyphens_is_refused_with_the_form_that_works(typed):
    with pytest.raises(UserError, match=f"without hyphens, {typed.lstrip('-')}"):
        hydra_arguments([typed], TEXT)


def test_a_sweep_cannot_be_shown_as_one_configuration():
    with pytest.raises(UserError, match="leave out -m"):
        hydra_arguments(["-m", "strategy=paged", "--cfg", "job"], TEXT)
