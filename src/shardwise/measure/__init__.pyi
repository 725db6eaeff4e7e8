from .reconcile.payloads import reconcile_payload as reconcile_payload
from .reconcile.reconciliation import Reconciliation as Reconciliation
from .reconcile.reconciliation import read_run as read_run
from .utilisation.measured_run import MeasuredStep as MeasuredStep
from .utilisation.measured_run import RunSetup as RunSetup
from .utilisation.measured_run import UtilisationReport as UtilisationReport
