"""The explorer and the reports: Python answers, a page draws.

state      what is shown, as one value, and its address: the query of a URL
asked      a state with the values that its names stand for
views/     one pure function for each view: what was asked -> the payload of `--json`, with where each number is from
controls   what can be changed: every option with the change that it makes, and why it cannot be taken
searches   the best layout and the Pareto front of a job, in a process of its own
explorer   states in, payloads out; what is kept between questions
server     the routes; `guard` what a request must be to reach them
report     the same page and one payload in a single file
page/      the page's modules, without a build step: `draw(payload)` of each view, used by the page and by reports

One file for each view: a pure function of what was asked to the payload that the page draws.

A view has the payload of the command that prints the same numbers with `--json`, under that command's name.
"""
