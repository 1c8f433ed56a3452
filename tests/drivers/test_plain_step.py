"""The short way through a torchrl environment's step: it gives what torchrl gives, or is not taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data import Categorical, Composite, OneHot, Unbounded
from torchrl.envs import Compose, EnvBase, GymEnv, StepCounter, TransformedEnv
from torchrl.envs.transforms import (
    ActionDiscretizer,
    CatFrames,
    DoubleToFloat,
    FrameSkipTransform,
    InitTracker,
    ObservationNorm,
    RewardSum,
    Transform,
    UnsqueezeTransform,
)

from shoal import ParallelEnv, SerialEnv
from shoal.drivers.plain_step import PlainStep, plain_copy, steps_plainly
from tests.differential.harness import assert_same

pytestmark = pytest.mark.usefixtures("nothing_left")


def three_flags() -> Composite:
    return Composite(
        {name: Categorical(2, shape=(1,), dtype=torch.bool) for name in ("done", "terminated", "truncated")}
    )


class Own(EnvBase):
    """Counts its steps and ends after five; gives whatever its parameters say of flags, rewards and leaves."""

    flags: tuple[str, ...] = ("done",)
    reward_shape: tuple[int, ...] = (1,)

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.observation_spec = Composite(count=Unbounded((2,)), parity=Unbounded((1,), dtype=torch.int64))
        self.action_spec = Categorical(3)
        self.reward_spec = Unbounded((1,))
        self.steps = 0

    def observe(self) -> dict[str, torch.Tensor]:
        return {"count": torch.full((2,), float(self.steps)), "parity": torch.tensor([self.steps % 2])}

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        self.steps = 0
        return TensorDict(self.observe(), device=self.device)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.steps += 1
        over = torch.tensor([self.steps >= 5])
        reward = tensordict["action"].float().reshape(self.reward_shape)
        result = TensorDict({**self.observe(), "reward": reward}, device=self.device)
        for name in self.flags:
            result.set(name, over.clone())
        return result

    def _set_seed(self, seed: int | None) -> None:
        """Draws nothing."""


class WithState(Own):
    """Reads and moves a state that it does not show."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state_spec = Composite(drift=Unbounded((1,)))

    def _reset(self, tensordict: TensorDictBase | None = None, **kwargs: Any) -> TensorDictBase:
        return super()._reset(tensordict, **kwargs).set("drift", torch.ones(1))

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super()._step(tensordict)
        result["reward"] = result["reward"] + tensordict["drift"]
        tensordict["drift"] = tensordict["drift"] * 2
        return result


class TerminatedOnly(Own):
    flags = ("terminated",)


class BothFlags(Own):
    flags = ("done", "terminated")


class NoFlag(Own):
    """Never ends."""

    flags = ()


class Brain(Own):
    """Shows a number that numpy does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.observation_spec["brain"] = Unbounded((2,), dtype=torch.bfloat16)

    def observe(self) -> dict[str, torch.Tensor]:
        return {**super().observe(), "brain": torch.full((2,), 0.1 * self.steps, dtype=torch.bfloat16)}


class FlatReward(Own):
    """Its reward lacks the last dimension, which torchrl adds."""

    reward_shape = ()


class FlatFlag(Own):
    """Its flag lacks the last dimension, which torchrl adds."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super()._step(tensordict)
        return result.set("done", result["done"].squeeze(-1))


class MoreLeaves(Own):
    """Gives leaves that no spec knows, flat and nested, and notes something in its input."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict.set("note", torch.tensor([self.steps])).set("reward", torch.ones(1))
        result = super()._step(tensordict)
        return result.update({"unknown": torch.ones(2), "inner": {"unknown": torch.ones(1)}})


class NestedNote(Own):
    """Notes something nested in its input."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        tensordict.set("note", TensorDict({"deep": torch.tensor([self.steps])}))
        return super()._step(tensordict)


class Locked(BothFlags):
    """Gives a locked result."""

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).lock_()


class WithTruncated(Own):
    """Has a third flag."""

    flags = ("done", "terminated", "truncated")

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.done_spec = three_flags()


class ThirdFlagLeftOut(WithTruncated):
    flags = ("terminated",)


class CutShort(Own):
    """Tells of its end by a flag that its spec does not have."""

    flags = ("truncated",)

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).set("terminated", torch.tensor([False]))


class NoDevice(Own):
    """Gives results without the device that it has."""

    def __init__(self) -> None:
        super().__init__(device="cpu")

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return super()._step(tensordict).clear_device_()


class OwnStep(Own):
    """Has a step of its own."""

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super().step(tensordict)
        result["next", "reward"] += 1
        return result


class OwnCompletion(Own):
    def _step_proc_data(self, next_tensordict_out: TensorDictBase) -> TensorDictBase:
        result = super()._step_proc_data(next_tensordict_out)
        return result.set("reward", result["reward"] * 2)


class Checked(Own):
    def __init__(self) -> None:
        super().__init__(run_type_checks=True)


class Doubled(Transform):
    """Changes the root after a step."""

    def _post_step_mdp_hooks(self, tensordict: Any, tensordict_: Any) -> Any:
        return tensordict, tensordict_.set("count", tensordict_["count"] * 2)


class Turning(Transform):
    """Turns actions round, in an ``inv`` of its own."""

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.copy().set("action", 2 - tensordict["action"])


def turned() -> EnvBase:
    return TransformedEnv(Own(), Turning())


def hooked() -> EnvBase:
    return TransformedEnv(Own(), Compose(StepCounter(), Doubled()))


def transformed() -> EnvBase:
    return TransformedEnv(Own(), Compose(StepCounter(3), RewardSum()))


def gym_with_transform() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), StepCounter(4))


def gym_with_many() -> EnvBase:
    norm = ObservationNorm(0.5, 2.0, in_keys=["observation"], standard_normal=True)
    stacked = UnsqueezeTransform(-1, in_keys=["observation"]), CatFrames(3, -1, in_keys=["observation"])
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(InitTracker(), norm, RewardSum(), *stacked, StepCounter(7)))


def gym_with_inverse() -> EnvBase:
    env = GymEnv("Pendulum-v1", frame_skip=2)
    return TransformedEnv(env, Compose(ActionDiscretizer(5), DoubleToFloat(), StepCounter(6)))


def gym_by_numbers() -> EnvBase:
    env = GymEnv("CartPole-v1", categorical_action_encoding=True, device="cpu")
    return TransformedEnv(TransformedEnv(env, RewardSum()), StepCounter(5), auto_unwrap=False)


def gym_with_skips() -> EnvBase:
    return TransformedEnv(GymEnv("CartPole-v1"), Compose(FrameSkipTransform(2), StepCounter(4)))


def on_cpu() -> EnvBase:
    return Own(device="cpu")


PLAIN: list[Callable[[], EnvBase]] = [
    Own,
    WithState,
    Brain,
    TerminatedOnly,
    BothFlags,
    WithTruncated,
    on_cpu,
    transformed,
    gym_with_transform,
    gym_with_many,
    gym_with_inverse,
    gym_by_numbers,
    gym_with_skips,
]
"""Environments whose steps all go the short way."""

TORN: list[Callable[[], EnvBase]] = [
    NoFlag,
    FlatReward,
    FlatFlag,
    Locked,
    NestedNote,
    MoreLeaves,
    ThirdFlagLeftOut,
    CutShort,
    NoDevice,
    turned,
]
"""Environments that the short way is made for, and whose results it must leave to torchrl, or look at twice."""

OTHERS: list[Callable[[], EnvBase]] = [OwnStep, OwnCompletion, Checked, hooked]
"""Environments that the short way must leave alone."""


def walk(env: EnvBase, steps: int = 12) -> list[TensorDictBase]:
    """What steps with given actions give, and the roots between them."""
    env.set_seed(3, static_seed=True)
    root, found = env.reset(), []
    for step in range(steps):
        given = root.clone().set("action", example(env, step))
        following, root = env.step_and_maybe_reset(given)
        found += [following.clone(), root.clone()]
    return found


def example(env: EnvBase, step: int) -> torch.Tensor:
    spec = env.full_action_spec["action"]
    if not isinstance(spec, OneHot):
        return torch.full(spec.shape, step % getattr(spec.space, "n", 3))
    return torch.nn.functional.one_hot(torch.full(spec.shape[:-1], step % spec.shape[-1]), spec.shape[-1])


@pytest.mark.parametrize(
    "factory",
    [each for each in [*PLAIN, *TORN, *OTHERS] if each is not WithState],
    ids=lambda factory: factory.__name__,
)
@pytest.mark.parametrize("kind", [SerialEnv, ParallelEnv])
def test_a_row_gives_what_the_environment_alone_gives(kind: Any, factory: Callable[[], EnvBase]) -> None:
    env, alone = kind(2, factory), factory()
    known = set(alone.reset().keys(True, True)) | {"action"}
    known |= {("next", key) for key in [*known, "reward"] if key != "action"}
    for ours, theirs in zip(walk(env), walk(alone), strict=True):
        expected = theirs.select(*known, strict=False)
        for row in ours.unbind(0):
            assert_same(expected, row.select(*expected.keys(True, True)), sizes=False)
    env.close()


@pytest.mark.parametrize("factory", [*PLAIN, *TORN], ids=lambda factory: factory.__name__)
def test_result_and_root_are_those_of_torchrl(factory: Callable[[], EnvBase]) -> None:
    ours, theirs = factory(), factory()
    assert steps_plainly(ours)
    plain_step = PlainStep(ours, 0)
    ours.set_seed(3)
    theirs.set_seed(3)
    root, expected_root = ours.reset(), theirs.reset()
    held: list[tuple[TensorDictBase, TensorDictBase]] = []
    for step in range(4):
        action = example(ours, step)
        following, root = plain_step(plain_copy(root).set("action", action))
        expected, expected_root = theirs.step_and_maybe_reset(expected_root.set("action", action))
        assert_same(expected["next"], following)
        assert following.device == expected["next"].device
        held.append((following, following.clone()))
        if theirs.any_done(expected["next"]):
            assert step >= 2
            break
        assert_same(expected_root, root)
        assert root.batch_size == expected_root.batch_size
        assert root.device == expected_root.device
    for result, then in held:  # what follows does not touch it
        assert_same(then, result)


@pytest.mark.parametrize("factory", PLAIN, ids=lambda factory: factory.__name__)
def test_plain_results_go_the_short_way(factory: Callable[[], EnvBase], monkeypatch: pytest.MonkeyPatch) -> None:
    env = factory()
    root = env.reset()
    plain_step = PlainStep(env, 0)
    for owner, name in ((EnvBase, "step"), (EnvBase, "_step_mdp"), (EnvBase, "_step_proc_data")):
        monkeypatch.setattr(owner, name, None)
    if isinstance(env, TransformedEnv) and factory is not gym_with_skips:  # that transform steps by itself
        monkeypatch.setattr(TransformedEnv, "_step", None)
        monkeypatch.setattr(GymEnv, "_step", None)
    following, after = plain_step(root.set("action", example(env, 0)))
    assert following["done"].shape == (1,)
    assert set(after.keys()) >= {"done", "action"}


@pytest.mark.parametrize("factory", OTHERS, ids=lambda factory: factory.__name__)
def test_what_changes_a_step_is_left_to_torchrl(factory: Callable[[], EnvBase]) -> None:
    assert not steps_plainly(factory())


def test_a_step_set_on_the_instance_is_left_to_torchrl() -> None:
    env = Own()
    env.__dict__["step"] = env.step
    assert not steps_plainly(env)


class Flawed(Own):
    """Lacks what its spec promises."""

    def __init__(self, flaw: str) -> None:
        super().__init__()
        self.flaw = flaw
        if flaw == "terminated":
            self.done_spec = three_flags()

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super()._step(tensordict)
        if self.flaw == "reward":
            return result.exclude("reward")
        if self.flaw == "size":
            return result.set("reward", torch.ones(2))
        return result.set("truncated", torch.tensor([False]))


@pytest.mark.parametrize("flaw", ["reward", "size", "terminated"])
def test_what_torchrl_refuses_is_refused(flaw: str) -> None:
    alone = Flawed(flaw)
    with pytest.raises(Exception) as expected:  # noqa: PT011 whatever it is, ours must be the same
        alone.step(alone.reset().set("action", torch.tensor(1)))
    env = SerialEnv(1, Flawed, create_env_kwargs={"flaw": flaw})
    with pytest.raises(type(expected.value)) as found:
        env.step(env.reset().set("action", torch.tensor([1])))
    assert str(expected.value) in str(found.value)
    env.close()


def test_a_copy_of_a_nested_tensordict_is_deep_in_its_nodes() -> None:
    nested = TensorDict({"a": torch.zeros(1), "inner": {"b": torch.zeros(1)}})
    copy = plain_copy(nested)
    copy["inner"].set("c", torch.ones(1))
    assert "c" not in nested["inner"].keys()
    named = TensorDict({"a": torch.zeros(3)}, [3], names=["time"])
    assert plain_copy(named).names == ["time"]


def test_a_transform_added_later_is_heeded() -> None:
    env = TransformedEnv(Own(), StepCounter())
    plain_step = PlainStep(env, 0)
    root = env.reset()
    env.append_transform(RewardSum())
    following, _ = plain_step(root.set("action", torch.tensor(2)).set("episode_reward", torch.zeros(1)))
    assert following["episode_reward"].item() == 2.0


def test_an_action_that_does_not_fit_is_left_to_torchrl(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = gym_with_transform(), gym_with_transform()
    for env in (ours, theirs):
        env.set_seed(0)
    action = torch.tensor([0.0, 1.0])  # a dtype of its own
    expected = theirs.step(theirs.reset().set("action", action))["next"]
    given, plain_step, step = ours.reset().set("action", action), PlainStep(ours, 0), GymEnv._step
    asked = []
    monkeypatch.setattr(GymEnv, "_step", lambda self, tensordict: asked.append(self) or step(self, tensordict))
    following, _ = plain_step(given)
    assert asked == [ours.base_env]
    assert_same(expected, following)


def test_an_action_with_a_gradient_leaves_none_behind() -> None:
    env = TransformedEnv(GymEnv("Pendulum-v1"), StepCounter())
    plain_step = PlainStep(env, 0)
    following, root = plain_step(env.reset().set("action", torch.ones(1, requires_grad=True)))
    assert not any(value.requires_grad for value in following.values())
    following, _ = plain_step(plain_copy(root).set("action", torch.ones(1)))
    assert not any(value.requires_grad for value in following.values())
    native = plain_step._step._step  # type: ignore[attr-defined]
    assert not any(buffer.requires_grad for _, buffer in native._inputs)


def test_an_exception_of_a_transformed_environment_is_its_own() -> None:
    class Failing(Own):
        def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
            raise ArithmeticError("not today")

    env = SerialEnv(2, lambda: TransformedEnv(Failing(), StepCounter()))
    with pytest.raises(ArithmeticError, match="not today") as caught:
        env.step(env.reset().set("action", torch.tensor([1, 1])))
    assert any("row 0" in note for note in getattr(caught.value, "__notes__", []))
    env.close()


class OddFlag(Own):
    """Ends with a number that is not one."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.done_spec = Composite({name: Unbounded((1,), dtype=dtype) for name in ("done", "terminated")})

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        result = super()._step(tensordict)
        return result.set("done", (2 * result["done"]).to(self.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_flags_of_any_dtype_end_an_episode(dtype: torch.dtype) -> None:
    env = ParallelEnv(2, OddFlag, create_env_kwargs={"dtype": dtype})
    counts = [root["count"][:, 0].tolist() for root in walk(env, 6)[1::2]]
    assert counts == [[1, 1], [2, 2], [3, 3], [4, 4], [0, 0], [1, 1]]
    env.close()
