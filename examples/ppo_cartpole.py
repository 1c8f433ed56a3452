"""PPO on CartPole-v1: shoal steps the environments, torchrl's `ClipPPOLoss` and `GAE` do the learning.

The file reads from top to bottom: the arguments, the environments, the agent, then the loop that collects a rollout,
estimates its advantages and learns from it. It stops as soon as the last 50 episodes return 475 on average, which is
how CartPole-v1 counts as solved, and draws the learning curve.

    python examples/ppo_cartpole.py --seed 1

The exit code is 0 if CartPole was solved and 1 if the step budget ran out first.
"""

import argparse
import ast
import inspect
import sys
import time
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path

import gymnasium as gym
import numpy as np
import torch
from matplotlib.figure import Figure
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModule
from torch import nn
from torchrl.modules import OneHotCategorical, ProbabilisticActor
from torchrl.objectives import ClipPPOLoss
from torchrl.objectives.value import GAE
from tqdm import tqdm

from shoal import ParallelEnv


@dataclass
class Args:
    """Train PPO on CartPole-v1 until it is solved."""

    seed: int = 0
    """seed of the networks, the actions and the environments"""
    total_timesteps: int = 300_000
    """environment steps after which to give up"""
    solved_return: float = 475.0
    """mean return of the last 50 episodes at which the task counts as solved"""
    output: Path = Path("runs/ppo_cartpole")
    """folder in which the learning curve is saved"""

    num_envs: int = 8
    """environments stepped side by side"""
    processes: int = 2
    """worker processes that carry the environments"""
    num_steps: int = 64
    """steps of each environment in one rollout"""

    learning_rate: float = 1e-3
    """learning rate of Adam at the start, annealed linearly to zero over total_timesteps"""
    gamma: float = 0.98
    """discount factor"""
    gae_lambda: float = 0.9
    """lambda of the generalized advantage estimate"""
    update_epochs: int = 10
    """passes over each rollout"""
    num_minibatches: int = 4
    """minibatches in each pass"""
    clip_coef: float = 0.2
    """clipping range of the probability ratio"""
    ent_coef: float = 0.0
    """weight of the entropy bonus"""
    vf_coef: float = 0.5
    """weight of the value loss"""
    max_grad_norm: float = 0.5
    """norm to which gradients are clipped"""


def parse_args() -> Args:
    """Read the command line. The docstring below each field of `Args` is its help."""
    body = ast.parse(inspect.getsource(Args)).body[0].body
    docs = {
        field.target.id: doc.value.value
        for field, doc in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(doc, ast.Expr)
    }
    parser = argparse.ArgumentParser(description=Args.__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    for field in fields(Args):
        flag = "--" + field.name.replace("_", "-")
        metavar = field.type.__name__.upper()
        parser.add_argument(flag, type=field.type, metavar=metavar, default=field.default, help=docs[field.name])
    return Args(**vars(parser.parse_args()))


def mlp(num_inputs: int, num_outputs: int, output_gain: float) -> nn.Sequential:
    """Two hidden layers of 64 tanh units, initialised orthogonally."""
    layers = [nn.Linear(num_inputs, 64), nn.Linear(64, 64), nn.Linear(64, num_outputs)]
    for layer, gain in zip(layers, [2**0.5, 2**0.5, output_gain], strict=True):
        nn.init.orthogonal_(layer.weight, gain)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


def save_learning_curve(path: Path, episodes: list[tuple[int, float]], solved_return: float, title: str) -> None:
    """Draw the return of each finished episode, and the mean of the last 50, against environment steps."""
    steps, returns = np.array(episodes).reshape(-1, 2).T
    sums = np.concatenate([[0.0], np.cumsum(returns)])
    ends = np.arange(1, len(sums))
    starts = np.maximum(ends - 50, 0)
    means = (sums[ends] - sums[starts]) / (ends - starts)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    axes.scatter(steps, returns, s=14, color="tab:blue", alpha=0.4, linewidths=0, label="episode")
    axes.plot(steps, means, color="tab:blue", linewidth=2, label="mean of the last 50 episodes")
    axes.axhline(solved_return, color="tab:green", linestyle="--", linewidth=1, label=f"solved ({solved_return:g})")
    axes.set(title=title, xlabel="environment steps", ylabel="episode return", ylim=(0, 520))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    args = parse_args()
    start_time = time.perf_counter()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)  # The networks are small: a second thread costs more than it brings.

    # The environments. The factory returns a plain Gymnasium env; keys, dtypes and the one-hot action are those of
    # torchrl's GymEnv.
    env = ParallelEnv(args.num_envs, lambda: gym.make("CartPole-v1"), processes=args.processes)
    env.set_seed(args.seed)
    num_observations = env.observation_spec["observation"].shape[-1]
    num_actions = env.action_spec.shape[-1]

    # The agent, and the two modules of torchrl that train it. The actor's last layer starts close to zero, so that the
    # first policy is close to uniform.
    actor_net = mlp(num_observations, num_actions, output_gain=0.01)
    critic_net = mlp(num_observations, 1, output_gain=1.0)
    actor = ProbabilisticActor(
        TensorDictModule(actor_net, in_keys=["observation"], out_keys=["logits"]),
        in_keys=["logits"],
        distribution_class=OneHotCategorical,
    )
    critic = TensorDictModule(critic_net, in_keys=["observation"], out_keys=["state_value"])
    gae = GAE(gamma=args.gamma, lmbda=args.gae_lambda, value_network=critic, deactivate_vmap=True)
    ppo_loss = ClipPPOLoss(
        actor,
        critic,
        clip_epsilon=args.clip_coef,
        entropy_coeff=args.ent_coef,
        critic_coeff=args.vf_coef,
        loss_critic_type="l2",
        normalize_advantage=True,
    )
    parameters = list(ppo_loss.parameters())
    optimizer = torch.optim.Adam(parameters, lr=args.learning_rate, eps=1e-5, fused=True)

    batch_size = args.num_envs * args.num_steps
    minibatch_size = batch_size // args.num_minibatches
    num_updates = max(1, args.total_timesteps // batch_size)

    global_step = 0
    collect_time = 0.0
    solved = False
    mean_return = float("nan")
    running_returns = torch.zeros(args.num_envs)
    episodes: list[tuple[int, float]] = []  # global_step at its end, and return, of each finished episode

    progress = tqdm(
        desc="PPO on CartPole-v1",
        total=num_updates * batch_size,
        unit=" steps",
        unit_scale=True,
        mininterval=0.1 if sys.stderr.isatty() else 10.0,  # A log file gets a few lines, not thousands.
    )
    root = env.reset()
    for update in range(num_updates):
        # Collect. An environment whose episode ends is reset within the same step: `transition["next"]` keeps the last
        # observation of the old episode, `root` holds the first one of the new.
        collect_start = time.perf_counter()
        transitions: list[TensorDictBase] = []
        for _ in range(args.num_steps):
            # Calling the network directly takes half as long as `actor(root)`, which counts at this size.
            with torch.no_grad():
                policy = OneHotCategorical(logits=actor_net(root["observation"]))
                root["action"] = policy.sample()
                root["action_log_prob"] = policy.log_prob(root["action"])
            transition, root = env.step_and_maybe_reset(root)
            transitions.append(transition)
            global_step += args.num_envs

            running_returns += transition["next", "reward"].squeeze(-1)
            done = transition["next", "done"].squeeze(-1)
            if done.any():
                episodes.extend((global_step, episode_return) for episode_return in running_returns[done].tolist())
                running_returns[done] = 0.0
        collect_time += time.perf_counter() - collect_start

        if episodes:
            mean_return = float(np.mean([episode_return for _, episode_return in episodes[-50:]]))
        progress.set_postfix_str(f"mean return {mean_return:.1f}", refresh=False)
        progress.update(batch_size)
        if len(episodes) >= 50 and mean_return >= args.solved_return:
            solved = True
            break

        # Estimate advantages, with time as the last dimension. GAE tells the two ways an episode ends apart: after a
        # fall (terminated) no reward follows; at the limit of 500 steps (truncated) the value of the last observation
        # stands for those that would have.
        rollout = torch.stack(transitions, dim=-1)
        with torch.no_grad():
            gae(rollout)

        # Learn.
        optimizer.param_groups[0]["lr"] = args.learning_rate * (1.0 - update / num_updates)
        batch = rollout.select("observation", "action", "action_log_prob", "advantage", "value_target").flatten()
        for _ in range(args.update_epochs):
            for indices in torch.randperm(batch_size).split(minibatch_size):
                losses = ppo_loss(batch[indices])
                loss = losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
                optimizer.step()

    progress.close()
    env.close()
    wall_time = time.perf_counter() - start_time

    curve = args.output / f"learning_curve_seed_{args.seed}.png"
    save_learning_curve(
        curve, episodes, args.solved_return, f"PPO on CartPole-v1, {args.num_envs} envs, seed {args.seed}"
    )
    verdict = "Solved" if solved else "Not solved"
    print(f"{verdict}: the last {len(episodes[-50:])} episodes returned {mean_return:.1f} on average")
    print(f"Steps: {global_step:,} in {len(episodes):,} episodes and {wall_time:.1f} s")
    print(f"Speed: {global_step / collect_time:,.0f} steps/s while collecting, {global_step / wall_time:,.0f} overall")
    print(f"Curve: {curve}")
    sys.exit(0 if solved else 1)
