from .reconcile.payloads import reconcile_payload as reconcile_payload
from .reconcile.reconciliation import Reconciliation as Reconciliation
from .reconcile.reconciliation import read_run as read_run
from .utilisation import MeasuredStep as MeasuredStep
from .utilisation import RunSetup as RunSetup
from .utilisation import UtilisationReport as UtilisationReport
