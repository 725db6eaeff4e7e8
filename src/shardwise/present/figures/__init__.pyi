from .figures_page import draw_figures as draw_figures
from .figures_page import find_figures as find_figures
from .roofline_charts import block_chart as block_chart
from .roofline_charts import kernels_chart as kernels_chart
