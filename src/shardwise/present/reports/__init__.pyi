from .comparison import missed_limits_text as missed_limits_text
from .rooflines_and_rules import rule_report as rule_report
from .sharded_products import drawn_section as drawn_section
from .sharded_products import holder_sections as holder_sections
