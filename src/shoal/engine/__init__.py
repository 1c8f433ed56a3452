"""Processes, memory, signals and faults: the engine under the batched environments.

Nothing in this package knows torch, TensorDict or Gymnasium: it moves rows of arrays and opaque Python values
between a parent and its worker processes. It imports the standard library, numpy and cloudpickle only.
"""
