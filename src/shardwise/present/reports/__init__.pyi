from .books import rule_report as rule_report
from .comparison import missed_limits_text as missed_limits_text
from .sharding import drawn_section as drawn_section
from .sharding import holder_sections as holder_sections
