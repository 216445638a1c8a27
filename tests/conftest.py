"""Settings of the test process."""

import torch

# Small tensors: a second thread costs more in barriers than it computes, above all on a busy machine.
torch.set_num_threads(1)
