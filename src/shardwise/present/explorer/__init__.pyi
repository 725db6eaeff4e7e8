from .html_report import plan_report as plan_report
from .html_report import result_report as result_report
from .session import ExplorerSession as ExplorerSession
from .session import open_session as open_session
from .session import serve_session as serve_session
from .static_build import StaticBuild as StaticBuild
from .static_build import write_static_build as write_static_build
