from .product_checks import CheckedProduct as CheckedProduct
from .product_checks import EmittedProgram as EmittedProgram
from .product_checks import check_product as check_product
from .product_checks import emit_program as emit_program
