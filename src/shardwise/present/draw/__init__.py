"""Pictures as SVG: primitives, and charts of them."""
