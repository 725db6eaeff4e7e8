from .checkpoints.dcp_reader import METADATA_FILE as METADATA_FILE
from .recipe import TrainingRecipe as TrainingRecipe
from .trainer.preflight import check_run as check_run
from .trainer.training_engine import TrainingEngine as TrainingEngine
