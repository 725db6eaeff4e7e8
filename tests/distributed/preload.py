"""What the server that starts the ranks imports, so that they need not."""

import torch
import torch.distributed
import torch.distributed.checkpoint
import torch.distributed.device_mesh
import torch.nn
import torch.utils.checkpoint

import shardwise.layout.derivation
import shardwise.train.model

torch.set_num_threads(1)
