from .checkpoints.dcp_reader import METADATA_FILE as METADATA_FILE
from .host_description import Host as Host
from .host_description import TorchSupport as TorchSupport
from .host_description import describe_host as describe_host
from .recipe import TrainingRecipe as TrainingRecipe
from .trainer.preflight import check_run as check_run
from .trainer.training_engine import TrainingEngine as TrainingEngine
