from .product_checks import CheckedProduct as CheckedProduct
from .product_checks import EmittedProgram as EmittedProgram
from .product_checks import check_product as check_product
from .product_checks import emit_program as emit_program
from .training.plan_verification import PlanVerification as PlanVerification
from .training.plan_verification import verify_plan as verify_plan
from .training.training_case import small_recipe as small_recipe
