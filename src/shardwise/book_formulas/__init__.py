"""Closed forms of the books by name, and rooflines at the vendors' peaks, as explanations beside a derived price.

Nothing is planned with them; tests compare them with `price`. Entry points: `named_rules.get_rule` finds a rule by name,
`rules.book_rules` has those of one job, `rooflines.kernel_roofline` and `rooflines.block_roofline` those of a kernel and of a
model's block. May import `price`, `batch_size` and the rooms below them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
