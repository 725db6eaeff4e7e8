from .catalogue_values import CatalogueEntries as CatalogueEntries
from .catalogue_values import find_entries as find_entries
from .diagnosis import Diagnosis as Diagnosis
from .diagnosis import diagnose as diagnose
from .mcp_server import serve_stdio as serve_stdio
from .traces import both_traces as both_traces
from .traces import schedule_trace_text as schedule_trace_text
from .traces import step_trace_text as step_trace_text
