from .frameworks.targets import TARGETS as TARGETS
from .frameworks.targets import get_target as get_target
from .launches.export_launch import export as export
from .read_launch import read_files as read_files
