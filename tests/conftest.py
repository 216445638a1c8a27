"""Settings of the test process."""

import importlib.util
import os

# Before anything imports the hub's library: without a network it would try for half a minute.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

# Small tensors: a second thread costs more in barriers than it computes, above all on a busy machine.
torch.set_num_threads(1)


# Tests of the vLLM connector need an environment with vLLM (`make test` makes it and runs them there).
collect_ignore = [] if importlib.util.find_spec("vllm") else ["engine"]
