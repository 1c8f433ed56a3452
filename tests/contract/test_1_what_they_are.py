"""Section 1 of the contract: what the batched environments are."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
import torchrl.envs
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.envs import GymWrapper, StepCounter, TransformedEnv, check_env_specs, step_mdp
from torchrl.envs.batched_envs import BatchedEnvBase
from torchrl.modules import ProbabilisticActor, ValueOperator
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE

from shoal import ParallelEnv, SerialEnv
from tests.support import Counter
from tests.zoo.torchrl_envs import TORCHRL_ZOO, DifferentiableEnv

pytestmark = pytest.mark.usefixtures("nothing_left")

BOTH = pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])


@BOTH
def test_the_constructor_and_configure_parallel_take_what_the_reference_takes_with_the_same_defaults(
    kind: type,
) -> None:
    """Swapping one import line moves a torchrl user over."""
    reference = getattr(torchrl.envs, kind.__name__)
    for name in ("__init__", "configure_parallel"):
        ours = inspect.signature(getattr(kind, name)).parameters
        for parameter in inspect.signature(getattr(BatchedEnvBase, name)).parameters.values():
            mine = ours[parameter.name]
            assert (mine.kind, mine.default) == (parameter.kind, parameter.default), parameter
    public = {name for name in dir(reference) if not name.startswith("_")}
    assert public - set(dir(kind)) <= {"select_and_clone"}


@BOTH
def test_num_workers_and_create_env_fn_have_names_and_all_else_has_only_names(kind: type) -> None:
    env = kind(num_workers=2, create_env_fn=Counter)
    assert env.rollout(2).shape == (2, 2)
    env.close()
    with pytest.raises(TypeError, match="positional"):
        kind(2, Counter, {"length": 3})


@BOTH
def test_check_env_specs_takes_them_unchanged(kind: type) -> None:
    for factory in (Counter, lambda: TransformedEnv(GymWrapper(Counter()), StepCounter())):
        env = kind(2, factory)
        check_env_specs(env)
        env.close(raise_if_closed=False)


@BOTH
def test_losses_take_them_unchanged(kind: type) -> None:
    torch.manual_seed(0)
    env = kind(2, Counter)
    net = TensorDictModule(nn.Linear(3, 3), in_keys=["observation"], out_keys=["logits"])
    actor = ProbabilisticActor(
        net,
        in_keys=["logits"],
        spec=env.action_spec,
        distribution_class=torchrl.modules.OneHotCategorical,
        return_log_prob=True,
    )
    critic = ValueOperator(nn.Linear(3, 1), in_keys=["observation"])
    with torch.no_grad():
        data = env.rollout(6, actor, break_when_any_done=False)
    GAE(gamma=0.9, lmbda=0.9, value_network=critic)(data)
    losses = ClipPPOLoss(actor, critic)(data.reshape(-1))
    sum(value for key, value in losses.items() if key.startswith("loss_")).backward()
    assert all(parameter.grad is not None for parameter in (*net.parameters(), *critic.parameters()))
    env.close()


class Ordered(Counter):
    """Writes a line at the start and at the end of each step."""

    def __init__(self, log: str, row: int) -> None:
        super().__init__()
        self.path, self.row = log, row

    def write(self, what: str) -> None:
        with open(self.path, "a") as file:
            file.write(f"{what}{self.row} ")

    def step(self, action: int) -> Any:
        self.write("<")
        result = super().step(action)
        self.write(">")
        return result

    def pid(self) -> int:
        return os.getpid()


def test_serial_runs_its_sub_environments_in_this_process_one_after_the_other(tmp_path: Any) -> None:
    log = str(tmp_path / "log")
    env = SerialEnv(3, Ordered, create_env_kwargs=[{"log": log, "row": row} for row in range(3)])
    env.step(env.rand_action(env.reset()))
    assert env.call("pid") == [os.getpid()] * 3
    with open(log) as file:
        assert file.read().split() == ["<0", ">0", "<1", ">1", "<2", ">2"]
    env.close()


@pytest.mark.parametrize("processes", [None, 2])
def test_parallel_runs_its_sub_environments_in_worker_processes(tmp_path: Any, processes: int | None) -> None:
    kwargs = [{"log": str(tmp_path / "log"), "row": row} for row in range(3)]
    env = ParallelEnv(3, Ordered, create_env_kwargs=kwargs, processes=processes)
    env.reset()
    pids = env.call("pid")
    assert os.getpid() not in pids
    assert len(set(pids)) == (processes or 3)
    env.close()


class Learned(DifferentiableEnv):
    """Has a parameter of its own, so its results have a graph whatever the action."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict.set("action", tensordict["action"] * self.weight))


@pytest.mark.parametrize("share", [None, True])
@pytest.mark.parametrize("buffers", [None, False])
def test_parallel_works_under_no_grad(buffers: bool | None, share: bool | None) -> None:
    env = ParallelEnv(2, Learned, processes=1, use_buffers=buffers, share_individual_td=share)
    td = env.reset()
    for _ in range(3):
        td["action"] = torch.full((2, 2), 0.5, requires_grad=True)
        done, td = env.step_and_maybe_reset(td)
        assert not any(value.requires_grad for value in done["next"].values(True, True))
        assert not td["observation"].requires_grad
    env.close()


class Nested(Counter):
    """Observes numbers below a key of their own."""

    observation_space = gym.spaces.Dict(
        deep=gym.spaces.Dict(count=gym.spaces.Box(-np.inf, np.inf, (3,))), flat=gym.spaces.Box(-np.inf, np.inf, (2, 2))
    )

    def observe(self) -> Any:
        return {"deep": {"count": super().observe()}, "flat": np.full((2, 2), self.steps, np.float32)}


VARIANTS: dict[str, Any] = {
    "serial": SerialEnv,
    "parallel": functools.partial(ParallelEnv, processes=1),
    "serial-lazy": functools.partial(SerialEnv, share_individual_td=True),
    "parallel-lazy": functools.partial(ParallelEnv, processes=1, share_individual_td=True),
    "messages": functools.partial(ParallelEnv, processes=1, use_buffers=False),
}
variants = pytest.mark.parametrize("variant", VARIANTS)


@variants
@pytest.mark.parametrize("name", [None, "batched_agents"])
def test_every_leaf_of_every_result_has_the_batch_size_and_the_device(variant: str, name: str | None) -> None:
    """``batch_size`` is ``[N, *sub.batch_size]``; every leaf has that as its leading shape and ``env.device``."""
    factory = Nested if name is None else TORCHRL_ZOO[name]
    sub = torch.Size([]) if name is None else factory().batch_size
    # no data is ever read from a "meta" tensor, so it stands in for any other device
    for device in (None, "cpu", "meta") if name is None else ("cpu",):
        env = VARIANTS[variant](2, factory, device=device)
        wanted = None if device is None else torch.device(device)
        assert env.batch_size == (2, *sub)
        assert env.device == wanted
        root = env.reset()
        results = [root]
        if device != "meta":
            td = env.rand_action(root.clone())
            results += [env.step(td.clone())["next"], *env.step_and_maybe_reset(td.clone())]
            mask = torch.zeros(2, *sub, 1, dtype=torch.bool)
            results.append(env.reset(td.empty().set("_reset", mask)))
            step = torch.tensor([True, False]).reshape(2, *[1] * len(sub)).expand(2, *sub)
            results.append(env.step(td.clone().set("_step", step))["next"])
        for result in results:
            assert result.device == wanted
            nodes = [result, *(value for value in result.values(True) if hasattr(value, "keys"))]
            assert all(node.batch_size[: 1 + len(sub)] == (2, *sub) for node in nodes)
            assert all(node.device == wanted for node in nodes)
            for key, value in result.items(True, True):
                assert value.shape[: 1 + len(sub)] == (2, *sub), key
                assert value.device.type == (device or "cpu"), key
        env.close()


def _tensors(result: Any) -> list[torch.Tensor]:
    rows = result.unbind(0) if isinstance(result, LazyStackedTensorDict) else [result]
    return [value for row in rows for value in row.values(True, True)]


@variants
@pytest.mark.parametrize("name", [None, "dynamic", "in_place"])
def test_every_leaf_of_every_result_owns_its_memory(variant: str, name: str | None) -> None:
    """What the caller writes to a result changes neither another result nor what the environment knows."""
    env = VARIANTS[variant](2, Counter if name is None else TORCHRL_ZOO[name])
    env.set_seed(1)
    action = env.full_action_spec.rand()
    td = env.reset().update(action)
    first, root = env.step_and_maybe_reset(td)
    kept = root.clone()
    for value in _tensors(first["next"]):
        value.zero_() if value.dtype == torch.bool else value.fill_(77)
    assert (root == kept).all()
    for value in _tensors(root):
        value.zero_() if value.dtype == torch.bool else value.fill_(78)
    mask = torch.zeros(2, 1, dtype=torch.bool)
    latest = env.reset(kept.empty().set("_reset", mask))
    for key in latest.keys(True, True):
        for row in range(2):
            assert torch.equal(latest[row][key], kept[row][key]), key
    for value in _tensors(latest):
        value.zero_() if value.dtype == torch.bool else value.fill_(79)
    again = env.reset(kept.empty().set("_reset", mask))
    for key in again.keys(True, True):
        for row in range(2):
            assert torch.equal(again[row][key], kept[row][key]), key
    env.close()


@variants
def test_nothing_that_happens_later_changes_a_result_of_any_transport(variant: str) -> None:
    env = VARIANTS[variant](2, Counter)
    td, kept = env.reset(), []
    kept.append((td.copy(), td.clone()))
    for step in range(12):
        td = env.rand_action(td)
        if step % 3 == 2:
            td = env.step(td.set("_step", torch.tensor([True, False])))
            root = step_mdp(td.exclude("_step"))
            root = env.reset(root.set("_reset", torch.tensor([[False], [True]])))
            done = td.exclude("_step")
        else:
            done, root = env.step_and_maybe_reset(td)
        kept += [(done["next"], done["next"].clone()), (root.copy(), root.clone())]
        td = root
    env.reset()
    env.close()
    for result, copy in kept:
        assert (result == copy).all()
