"""The books' rules, rooflines and figures: closed forms, as explanations and as tests."""
