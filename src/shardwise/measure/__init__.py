"""What is measured, and what follows from it: micro-benchmarks, calibrated constants, and runs compared with their plans.

Imports everything but `verify` and `present`. This file imports nothing."""
