from .batch_size.noise_scale import NoiseScale as NoiseScale
from .batch_size.run_noise import RunNoise as RunNoise
from .batch_size.run_noise import run_noise as run_noise
from .book_formulas.cheat_sheet import CheatSheet as CheatSheet
from .book_formulas.named_rules import NamedRule as NamedRule
from .book_formulas.named_rules import RuleValue as RuleValue
from .book_formulas.rooflines import BlockRoofline as BlockRoofline
from .book_formulas.rooflines import KernelComparison as KernelComparison
from .book_formulas.rooflines import KernelRoofline as KernelRoofline
from .book_formulas.rules import Rule as Rule
from .book_formulas.rules import book_rules as book_rules
from .hardware.chips import Chip as Chip
from .hardware.chips import load_chip as load_chip
from .hardware.cluster import Cluster as Cluster
from .hardware.cluster_loading import load_cluster as load_cluster
from .hardware.network.compare_collective_algorithms import PlacedCollective as PlacedCollective
from .layout.choices import Choices as Choices
from .layout.layout import Layout as Layout
from .layout.network_groups import ClusterNetwork as ClusterNetwork
from .measure.calibrate.cluster_calibration import ClusterCalibration as ClusterCalibration
from .measure.calibrate.validation import EvaluatedRuns as EvaluatedRuns
from .measure.utilisation import UtilisationReport as UtilisationReport
from .model.architecture import Architecture as Architecture
from .model.job import Job as Job
from .model.load import load_model as load_model
from .model.parameters_and_flops import num_params as num_params
from .pipeline.compare_schedules import ScheduleComparison as ScheduleComparison
from .pipeline.timeline import Timeline as Timeline
from .present.figures.figure import Figure as Figure
from .present.figures.figures_page import figure as figure
from .present.json_schemas import json_schemas as json_schemas
from .present.verbs.calibration import calibrate as calibrate
from .present.verbs.calibration import validate as validate
from .present.verbs.cheat_sheets import cheat_sheet as cheat_sheet
from .present.verbs.environment import doctor as doctor
from .present.verbs.estimate import estimate as estimate
from .present.verbs.explanation import explain as explain
from .present.verbs.interop import convert as convert
from .present.verbs.interop import export_plan as export_plan
from .present.verbs.interop import read_launch as read_launch
from .present.verbs.kernels import kernels as kernels
from .present.verbs.many_plans import plan_clusters as plan_clusters
from .present.verbs.many_plans import plan_to_loss as plan_to_loss
from .present.verbs.many_plans import sweep as sweep
from .present.verbs.measurement import mfu as mfu
from .present.verbs.memory import kv_cache as kv_cache
from .present.verbs.memory import memory as memory
from .present.verbs.pipeline_schedule import schedule as schedule
from .present.verbs.pipeline_schedule import schedules as schedules
from .present.verbs.planning import plan as plan
from .present.verbs.rooflines_and_rules import precision as precision
from .present.verbs.rooflines_and_rules import roofline as roofline
from .present.verbs.rooflines_and_rules import rule as rule
from .present.verbs.rooflines_and_rules import rules as rules
from .present.verbs.serving import serve_estimate as serve_estimate
from .present.verbs.serving import serve_plan as serve_plan
from .present.verbs.serving_launches import serve_read as serve_read
from .present.verbs.sharded_products import collective as collective
from .present.verbs.sharded_products import matmul as matmul
from .present.verbs.sharded_products import reshard as reshard
from .present.verbs.simulation import instructions as instructions
from .present.verbs.simulation import simulation as simulation
from .present.verbs.switched_networks import network as network
from .price.estimate import Estimate as Estimate
from .price.reliability import Reliability as Reliability
from .price.simulation.result import Simulation as Simulation
from .price.training_run import Limits as Limits
from .price.training_run import Run as Run
from .price.training_run import training_run as training_run
from .search.compare_clusters import Comparison as Comparison
from .search.explain.explanation import Explanation as Explanation
from .search.instruction_listing import InstructionListing as InstructionListing
from .search.layout_memory import LayoutMemory as LayoutMemory
from .search.layout_memory import MemoryComparison as MemoryComparison
from .search.loss_time import LossSearch as LossSearch
from .search.plan import Plan as Plan
from .search.plan import plan_layout as plan_layout
from .search.plan_file import dump_plan as dump_plan
from .search.plan_file import load_plan as load_plan
from .search.plan_sweep import Swept as Swept
from .values.dtypes import FormatComparison as FormatComparison
from .values.errors import (
    InputError as InputError,
)
from .values.errors import (
    MissedLimitError as MissedLimitError,
)
from .values.errors import (
    MissingValueError as MissingValueError,
)
from .values.errors import (
    NothingFitsError as NothingFitsError,
)
from .values.errors import (
    ShardwiseError as ShardwiseError,
)
from .values.progress import Progress as Progress
from .verify.product_checks import CheckedProduct as CheckedProduct
from .verify.product_checks import EmittedProgram as EmittedProgram
from .version import __version__ as __version__
