from .batch_schedule import BatchRamp as BatchRamp
from .batch_schedule import parse_batch_schedule as parse_batch_schedule
from .branch_losses import BranchPoint as BranchPoint
from .noise_scale import NoiseScale as NoiseScale
from .noise_scale import parse_noise_scale as parse_noise_scale
from .tradeoff import BatchTradeoff as BatchTradeoff
from .tradeoff import LossTarget as LossTarget
