"""Reports as values, and their renderings: plain text, terminal, notebook.

`report` has the types; `plain_text.plain` writes a report for pipes and files, `terminal.drawn` for a terminal."""
