"""Section 6 of the contract: ``env[...]``, live views of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal import ParallelEnv, SerialEnv
from tests.support import Named
from tests.zoo.torchrl_envs import CountingEnv

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture(params=["serial", "parallel", "grouped"])
def env(request: pytest.FixtureRequest) -> Iterator[Any]:
    kwargs: dict[str, Any] = {"create_env_kwargs": [{"index": i} for i in range(4)]}
    if request.param == "serial":
        env: Any = SerialEnv(4, Named, **kwargs)
    else:
        env = ParallelEnv(4, Named, processes=3 if request.param == "grouped" else None, **kwargs)
    env.reset()
    yield env
    env.close()


@pytest.mark.parametrize(
    ("item", "rows"),
    [
        (1, [1]),
        (-1, [3]),
        (slice(2, None), [2, 3]),
        ([0, 2], [0, 2]),
        ([3, 0], [3, 0]),
        (torch.tensor([1, 3]), [1, 3]),
        (torch.tensor([True, False, False, True]), [0, 3]),
        ([False, True, True, False], [1, 2]),
    ],
)
def test_a_view_steps_and_resets_only_its_rows(env: Any, item: Any, rows: list[int]) -> None:
    view = env[item]
    assert view.batch_size == (len(rows),)
    assert view.observation_spec["observation"].shape == (len(rows), 3)
    assert view.get_attr("index") == rows
    td = view.rand_action(view.reset())
    td = view.step(td)
    assert td["next", "observation"][:, 0].tolist() == [1] * len(rows)
    done, root = view.step_and_maybe_reset(view.step_mdp(td))
    assert done["next", "observation"][:, 0].tolist() == [2] * len(rows)
    assert root["observation"][:, 0].tolist() == [2] * len(rows)
    assert [env.get_attr("steps")[row] for row in range(4)] == [2 if row in rows else 0 for row in range(4)]
    whole = env.reset(torch_mask(env, []))
    assert whole["observation"][:, 0].tolist() == [2 if row in rows else 0 for row in range(4)]


def torch_mask(env: Any, rows: list[int]) -> Any:
    mask = torch.zeros(4, 1, dtype=torch.bool)
    mask[rows] = True
    return env.rand_action().empty().set("_reset", mask)


def test_a_partial_step_of_a_view_moves_rows_counted_within_it(env: Any) -> None:
    view = env[[3, 1]]
    td = view.rand_action(view.reset())
    td.set("_step", torch.tensor([False, True]))
    td = view.step(td)
    assert td["next", "observation"][:, 0].tolist() == [0, 1]
    assert env.get_attr("steps") == [0, 1, 0, 0]


def test_a_view_of_a_view_is_a_view(env: Any) -> None:
    assert env[1:][[0, 2]].get_attr("index") == [1, 3]


@pytest.mark.parametrize(
    "item", [4, -5, [], [0, 4], [1, 1], [1, -3], slice(4, 9), [True, False], torch.tensor([[0]]), [False] * 4]
)
def test_an_index_that_picks_nothing_is_an_index_error(env: Any, item: Any) -> None:
    with pytest.raises(IndexError):
        _ = env[item]


def test_closing_a_view_leaves_the_rows_alone_and_closing_the_environment_ends_the_view(env: Any) -> None:
    view, other = env[0], env[1]
    view.close()
    with pytest.raises(RuntimeError, match="take a new view"):
        view.reset()
    assert other.reset()["observation"].shape == (1, 3)
    env.close()
    with pytest.raises(RuntimeError, match="take a new view"):
        other.reset()
    env.reset()


class Snapshots(CountingEnv):
    """Takes the count of another environment."""

    def __setitem__(self, item: Any, source: CountingEnv) -> None:
        self.count = source.count


@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_a_snapshot_is_written_back_to_the_rows_that_are_picked(kind: type) -> None:
    env = kind(3, Snapshots)
    env.reset()
    one, two = Snapshots(), Snapshots()
    one.count, two.count = torch.tensor(2), torch.tensor(1)
    env[1] = one
    env[[0, 2]] = [two, one]
    assert [int(count) for count in env.get_attr("count")] == [1, 2, 2]
    with pytest.raises(ValueError, match="1 snapshots for 2 rows"):
        env[:2] = one
    env.close()


def test_a_snapshot_is_refused_where_the_environment_takes_none() -> None:
    env = SerialEnv(2, Named)
    env.reset()
    with pytest.raises(TypeError, match="a snapshot is an environment"):
        env[0] = 3
    with pytest.raises(NotImplementedError, match="take no snapshot"):
        env[0] = SerialEnv(1, Named)
    env.close()
