"""The command's part in a group, seen from one process; tests/hosts has several."""

import numpy as np
import pytest

from tekoa import data
from tekoa.core import hosts, sharding, sharding_mesh
from tekoa.estimator import config as flags
from tekoa.estimator import group
from tekoa.estimator.passes import WithFirst


@pytest.mark.parametrize("name", ["num_processes", "process_id"])
def test_a_number_without_an_address_is_a_mistake(name):
    _, config = flags.parse(["train", f"--{name}=1"])
    with pytest.raises(flags.UsageError, match="--coordinator_address"):
        group.join(config)


def test_a_process_alone_joins_nobody():
    _, config = flags.parse(["train", "mnist"])
    assert group.join(config) is config
    assert group.shard(None, 7, "train_batch_size") == (0, 1)


def test_the_exit_code_passes():
    assert group.ended(lambda: 75) == 75


class LeftError(Exception):
    pass


def test_an_error_that_nobody_expected_leaves_the_group(monkeypatch, capsys):
    class Link:
        def leave(self, code, why):
            raise LeftError(code, why)

    monkeypatch.setattr(hosts, "_joined", [hosts.Hosts(index=1, count=2, link=Link())])

    def fail():
        raise OSError("disk")

    with pytest.raises(LeftError) as left:
        group.ended(fail)
    assert left.value.args == (1, "OSError: disk")
    assert "OSError: disk" in capsys.readouterr().err


@pytest.fixture
def halves(monkeypatch):
    """A mesh of which this process reads the second half of each batch."""
    monkeypatch.setattr(sharding, "local_rows", lambda _, n: slice(n // 2, n))
    return sharding.Layout(mesh=sharding_mesh.make_mesh())


@pytest.mark.parametrize(
    ("n", "seen"), [(8, [[2, 3], [6, 7]]), (6, [[2, 3], [4, 5]]), (3, [[0, 1, 2]])]
)
def test_full_batches_are_shared_out_and_the_rest_is_whole(halves, n, seen):
    source = data.as_source({"x": np.arange(n)})

    def batches(**options):
        return WithFirst(source.batches(4, epochs=1, **options), np.inf)

    given = []
    found = group.own_rows(
        halves,
        batches,
        n_examples=n,
        size=4,
        flag="eval_batch_size",
        whole=lambda batch: given.append(batch) or batch,
    )
    batches = list(found)
    assert [batch["x"].tolist() for batch in batches] == seen
    assert [bool(batch["is_first"][0]) for batch in batches] == [True, False][: len(seen)]
    assert len(given) == (1 if n % 4 else 0)


def test_rows_that_do_not_divide_are_a_mistake_of_the_flag():
    layout = sharding.Layout(mesh=sharding_mesh.make_mesh())
    with pytest.raises(flags.UsageError, match="--train_batch_size: A batch of 7 rows"):
        group.shard(layout, 7, "train_batch_size")
