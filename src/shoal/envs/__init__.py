"""The torchrl face of shoal: batched environments as torchrl users know them."""

from shoal.envs.envpool import MultiThreadedEnv
from shoal.envs.parallel import ParallelEnv
from shoal.envs.serial import SerialEnv

__all__ = ["MultiThreadedEnv", "ParallelEnv", "SerialEnv"]
