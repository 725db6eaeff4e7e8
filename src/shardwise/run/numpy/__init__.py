"""The NumPy executor: a unit's instruction list on virtual devices, where every element that moves is counted.

Entry point: `step.run_step`. Nothing here imports torch. May import `step` and the rooms below.
"""
