import itertools
import json

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tekoa import data

KINDS = ("arrays", "sequence", "lines", "iterable", "resumable", "two_arrays")
STREAMS = ("iterable", "resumable")


@st.composite
def plans(draw):
    """A kind of source, its length, a number of shards and valid options."""
    kind = draw(st.sampled_from(KINDS))
    n = draw(st.integers(1, 40))
    count = draw(st.integers(1, 8))
    options = {
        "batch_size": count * draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 3)),
        "epochs": draw(st.integers(1, 3)),
        "shuffle": draw(st.sampled_from([None, 3, 8] + ([] if kind in STREAMS else [True]))),
        "consecutive": draw(st.sampled_from([None, None, 1, 2, 3])),
        "remainder": draw(st.sampled_from(["drop", "pad", "keep"])),
    }
    if not options["consecutive"] and draw(st.booleans()):
        changes = draw(st.dictionaries(st.integers(1, 8), st.integers(1, 4), max_size=3))
        options["batch_size"] = {0: options["batch_size"]} | {
            i: count * n for i, n in changes.items()
        }
    group = options["consecutive"] or 1
    assume(not (options["consecutive"] and options["remainder"] == "keep"))
    n_groups = -(-n // group) if options["remainder"] == "pad" else n // group
    enough = sizes_of(options)[0] if options["remainder"] == "drop" else 1
    assume(n_groups * options["epochs"] >= enough)
    return kind, n, count, options


def sizes_of(options):
    """Returns the rows of each batch that a plan asks for, far beyond its end."""
    sizes = options["batch_size"]
    sizes = sizes if isinstance(sizes, dict) else {0: sizes}
    return [sizes[max(at for at in sizes if at <= i)] for i in range(200)]


def rows_of(batches):
    """Returns the rows of each batch without padding."""
    rows = []
    for batch in batches:
        mask = batch.get("mask", np.ones(len(batch["x"]), bool))
        rows.append(batch["x"][mask].tolist())
    return rows


def joined(parts):
    return [list(itertools.chain(*rows)) for rows in zip(*parts, strict=True)]


def check_each_once_per_epoch(rows, n, options):
    group = options["consecutive"] or 1
    all_rows = [row for batch in rows for row in batch]
    per_epoch = n if options["remainder"] == "pad" else n // group * group
    total = per_epoch * options["epochs"]
    sizes = sizes_of(options)
    if options["remainder"] == "drop":
        ends = itertools.accumulate(size * group for size in sizes)
        total = max(end for end in ends if end <= total)
    assert len(all_rows) == total
    for batch, size in zip(rows[:-1], sizes):
        assert group > 1 or len(batch) == size
    counts = np.bincount(all_rows, minlength=n)
    if total == per_epoch * options["epochs"]:
        assert (counts[:per_epoch] == options["epochs"]).all()
    if group == 1:
        for epoch in range(options["epochs"]):
            epoch_rows = all_rows[epoch * n : (epoch + 1) * n]
            assert len(set(epoch_rows)) == len(epoch_rows)
            assert len(epoch_rows) < n or sorted(epoch_rows) == list(range(n))


common = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)


@common
@given(plans())
def test_each_example_comes_once_per_epoch_over_all_shards(make_source, plan):
    kind, n, count, options = plan
    parts = [
        rows_of(make_source(kind, n).batches(shard=(at, count), **options)) for at in range(count)
    ]
    whole = rows_of(make_source(kind, n).batches(**options))
    assert joined(parts) == whole
    check_each_once_per_epoch(whole, n, options)


@common
@given(plans(), st.data())
def test_restored_batches_are_the_same_on_any_number_of_shards(make_source, plan, choice):
    kind, n, count, options = plan
    running = make_source(kind, n).batches(**options)
    rows, states = [], [running.state()]
    for batch in running:
        rows += rows_of([batch])
        states.append(running.state())
    at = choice.draw(st.integers(0, len(rows)))
    state = json.loads(json.dumps(states[at]))
    parts = []
    for index in range(count):
        again = make_source(kind, n).batches(shard=(index, count), **options)
        again.restore(state)
        assert again.state()["batch"] == at
        parts.append(rows_of(again))
    assert joined(parts) == rows[at:]


@common
@given(plans(), st.data())
def test_seek_moves_to_the_batch_of_a_fresh_iterator(make_source, plan, choice):
    kind, n, count, options = plan
    shard = (choice.draw(st.integers(0, count - 1)), count)
    expected = rows_of(make_source(kind, n).batches(shard=shard, **options))
    batches = make_source(kind, n).batches(shard=shard, **options)
    for _ in range(3):
        i = choice.draw(st.integers(0, len(expected) + 2))
        batches.seek(i)
        assert batches.state()["batch"] == i
        assert rows_of(itertools.islice(batches, 2)) == expected[i : i + 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"shuffle": 8}, {"shuffle": 8, "consecutive": 3}], ids=str)
def test_seek_works_in_an_endless_run(make_source, kind, options):
    fresh = make_source(kind, 23).batches(4, seed=1, **options)
    expected = rows_of(itertools.islice(fresh, 40))
    batches = make_source(kind, 23).batches(4, seed=1, **options)
    for i in (37, 0, 5, 21, 20):  # 23 examples: six batches reach into the second epoch.
        batches.seek(i)
        state = json.loads(json.dumps(batches.state()))
        assert rows_of([next(batches)]) == [expected[i]]
        restored = make_source(kind, 23).batches(4, seed=1, **options)
        restored.restore(state)
        assert rows_of([next(restored)]) == [expected[i]]


def test_changes_that_are_still_to_come_may_be_planned_anew(make_source):
    batches = make_source("arrays", 64).batches({0: 4, 3: 8}, shuffle=True, seed=1)
    rows = rows_of(itertools.islice(batches, 5))
    states = {}
    for i in (3, 5):
        batches.seek(i)
        states[i] = json.loads(json.dumps(batches.state()))
    assert (states[3]["examples"], states[5]["examples"]) == (12, 28)
    later = make_source("arrays", 64).batches({0: 4, 3: 8, 4: 2}, shuffle=True, seed=1)
    later.restore(states[3])
    assert rows_of([next(later), next(later)]) == [rows[3], rows[4][:2]]
    for sizes in ({0: 4, 3: 8, 4: 2}, 4, 8, {0: 4, 2: 8}):
        with pytest.raises(data.ChangedDataError, match="batch_size was '0:4,3:8', is"):
            make_source("arrays", 64).batches(sizes, shuffle=True, seed=1).restore(states[5])
    changed = make_source("arrays", 64).batches({0: 10, 2: 3}, shuffle=True, seed=1)
    changed.restore(states[5], allow_changes=True)
    assert changed.state()["examples"] == 29  # Two of 10 and three of 3: the first after 28.


def test_consecutive_batches_and_buckets_have_no_schedule(make_source):
    with pytest.raises(ValueError, match="continue one another"):
        make_source("arrays", 8).batches({0: 2, 1: 4}, consecutive=2)
    with pytest.raises(ValueError, match="multiple of their number, got 3 rows for 2 shards"):
        make_source("arrays", 8).batches({0: 2, 9: 3}, shard=(0, 2))


def test_seek_to_a_negative_batch_raises(make_source):
    with pytest.raises(ValueError, match=r"counted from 0, got seek\(-1\)"):
        make_source("arrays", 8).batches(4).seek(-1)


@common
@given(plans())
def test_rows_continue_within_a_consecutive_group(make_source, plan):
    kind, n, _, options = plan
    assume(options["consecutive"])
    group = options["consecutive"]
    batches = list(make_source(kind, n).batches(**options))
    assert len(batches) % group == 0
    for start in range(0, len(batches), group):
        columns = np.stack([batch["x"] for batch in batches[start : start + group]])
        masks = np.stack(
            [b.get("mask", np.ones(len(b["x"]), bool)) for b in batches[start:][:group]]
        )
        expected = columns[0] + np.arange(group)[:, None]
        assert (columns == expected)[masks].all()
        assert (columns[0] % group == 0)[masks[0]].all()


@pytest.mark.parametrize("kind", KINDS)
def test_restore_works_backwards_and_repeatedly(make_source, kind):
    batches = make_source(kind, 23).batches(4, shuffle=5, seed=1)
    rows, states = [], []
    for _ in range(20):
        states.append(batches.state())
        rows += rows_of([next(batches)])
    for at in (13, 2, 19, 2):
        batches.restore(states[at])
        assert rows_of([next(batches)]) == [rows[at]]


@pytest.mark.parametrize("count", [1, 2, 8])
def test_long_permutation_contains_each_example_once(make_source, count):
    n, options = 5003, {"batch_size": 16, "shuffle": True, "epochs": 2, "remainder": "keep"}
    parts = [
        rows_of(make_source("arrays", n).batches(shard=(at, count), **options))
        for at in range(count)
    ]
    all_rows = list(itertools.chain(*joined(parts)))
    assert sorted(all_rows[:n]) == sorted(all_rows[n:]) == list(range(n))
    assert all_rows[:n] != all_rows[n:]


def test_seeds_and_epochs_have_different_orders(make_source):
    def rows(seed):
        return rows_of(make_source("arrays", 64).batches(64, shuffle=True, seed=seed, epochs=2))

    first, second = rows(0)
    assert first != second
    assert rows(1)[0] != first
    assert rows(0) == [first, second]


def test_shuffled_stream_moves_no_row_beyond_the_window(make_source):
    (rows,) = rows_of(make_source("iterable", 40).batches(40, shuffle=8, epochs=1))
    assert rows != list(range(40))
    assert max(abs(at - row) for at, row in enumerate(rows)) < 8


def test_windows_have_different_orders(make_source):
    (rows,) = rows_of(make_source("lines", 80).batches(80, shuffle=16, epochs=1))
    windows = {tuple(row % 16 for row in rows[start : start + 16]) for start in range(0, 80, 16)}
    assert len(windows) == 5


def test_restore_discards_changes_to_a_batch(make_source):
    batches = make_source("arrays", 12).batches(4)
    start = batches.state()
    next(batches)["x"][:] = -1
    batches.restore(start)
    assert next(batches)["x"].tolist() == [0, 1, 2, 3]


def test_take_uses_the_first_examples_only(make_source):
    for kind in KINDS:
        rows = rows_of(make_source(kind, 30).batches(4, take=10, epochs=2, remainder="keep"))
        assert list(itertools.chain(*rows)) == [*range(10), *range(10)]


def test_padded_batches_have_a_mask_and_equal_shapes(make_source):
    batches = list(make_source("arrays", 5).batches(4, epochs=1, remainder="pad"))
    assert [batch["x"].shape for batch in batches] == [(4,), (4,)]
    assert batches[1]["mask"].tolist() == [True, False, False, False]
    assert batches[0]["mask"].dtype == bool


def test_masks_of_examples_are_false_in_the_padding():
    source = data.as_source({"x": np.arange(5), "token_mask": np.ones((5, 3), bool)})
    batches = list(source.batches(4, epochs=1, remainder="pad"))
    assert sum(batch["token_mask"].sum() for batch in batches) == 15
    assert source[4]["token_mask"].all()


def test_padding_raises_if_there_is_a_field_mask():
    source = data.as_source({"x": np.arange(5), "mask": np.ones(5)})
    with pytest.raises(data.DataError, match="adds a field 'mask'"):
        next(source.batches(4, remainder="pad"))


def test_kept_remainder_can_leave_a_shard_without_rows(make_source):
    last = list(make_source("arrays", 5).batches(4, epochs=1, remainder="keep", shard=(1, 2)))[-1]
    assert last["x"].shape == (0,)


def test_batches_are_not_views_of_the_data():
    x = np.arange(8)
    batch = next(data.as_source({"x": x}).batches(4))
    batch["x"][:] = -1
    assert x.tolist() == list(range(8))


CHANGES = {
    "seed": ({"seed": 8}, "seed was 7, is 8"),
    "batch": ({"batch_size": 8}, "batch_size was 4, is 8"),
    "order": ({"shuffle": None}, "order was 'permuted', is 'in order'"),
    "remainder": ({"remainder": "pad"}, "remainder was 'drop', is 'pad'"),
    "consecutive": ({"consecutive": 2}, "consecutive was None, is 2"),
    "length": ({"take": 30}, "up to 30"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_pipeline_raises_unless_changes_are_allowed(make_source, change):
    options = {"batch_size": 4, "seed": 7, "shuffle": True}
    before = make_source("arrays", 40).batches(**options)
    for _ in range(3):
        next(before)
    changed, message = CHANGES[change]
    after = make_source("arrays", 40).batches(**{**options, **changed})
    with pytest.raises(data.ChangedDataError, match=message):
        after.restore(before.state())
    after.restore(before.state(), allow_changes=True)
    # 12 examples were used: the first complete batch after them.
    assert after.state()["batch"] == -(-12 // {**options, **changed}["batch_size"])


@pytest.mark.parametrize("kind", KINDS)
def test_number_of_epochs_can_be_raised_after_a_restart(make_source, kind):
    before = make_source(kind, 10).batches(4, epochs=1)
    list(before)
    after = make_source(kind, 10).batches(4, epochs=3)
    after.restore(before.state())
    assert rows_of(after)[0] == [8, 9, 0, 1]


def test_options_may_be_numpy_numbers(make_source):
    batches = make_source("arrays", 10).batches(np.int64(4), seed=np.uint32(7))
    assert json.loads(json.dumps(batches.state()))["fingerprint"]["seed"] == 7


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in STREAMS])
def test_changed_length_raises(make_source, kind):
    state = make_source(kind, 40).batches(4).state()
    with pytest.raises(data.ChangedDataError, match="source was"):
        make_source(kind, 41).batches(4).restore(state)


def test_restoring_anything_but_a_position_raises(make_source):
    batches = make_source("arrays", 8).batches(4)
    with pytest.raises(
        data.ChangedDataError,
        match=r"one of another iterator, with the entries",
    ):
        batches.restore({"step": 3})
    with pytest.raises(data.ChangedDataError, match="has version 99"):
        batches.restore({**batches.state(), "version": 99})


@pytest.mark.parametrize("kind", KINDS)
def test_position_stays_small(make_source, kind):
    batches = make_source(kind, 40).batches(4, shuffle=8)
    for _ in range(500):
        next(batches)
    assert len(json.dumps(batches.state())) < 500


def test_nested_examples_are_stacked(make_source):
    source = data.as_source([({"gold": at}, (at, [0.0, 0.0])) for at in range(6)])
    gold, (number, zeros) = list(source.batches(4, epochs=1, remainder="keep"))[1]
    assert gold["gold"].tolist() == number.tolist() == [4, 5]
    assert zeros.shape == (2, 2)


def test_impossible_plan_raises_before_the_first_batch(make_source):
    with pytest.raises(data.DataError, match="fewer examples"):
        make_source("arrays", 3).batches(4, epochs=1)
    with pytest.raises(data.DataError, match="Set a window size"):
        make_source("iterable", 3).batches(1, shuffle=True)
