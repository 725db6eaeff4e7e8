"""An `Architecture` from a Hugging Face `config.json`.

Entry points: `config.load_config` (a path) and `config.parse_config` (a mapping). `family_rules.FAMILIES` has one rule for each
`model_type`; `field_readers` has the functions that read one field, `numerics_reader` reads the constants of the arithmetic.
"""
