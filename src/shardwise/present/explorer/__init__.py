"""The explorer and the reports: Python answers, a page draws.

state             what is shown, as one value, and its address: the query of a URL
request           a state with the values that its names stand for
*_view(s)         one pure function for each view: a request -> the payload of `--json`, with where each number is from
controls          what can be changed: every option with the change that it makes, and why it cannot be taken
run_card          days, dollars and energy of the whole run
tasks             tasks from the books: a start, a goal, and a check of the state
background_search the best layout and the Pareto front of a job, in a process of its own
explorer          states in, payloads out; what is kept between questions
page_wording      texts of the domain in the words of the page
web_server        the routes; `request_guard` what a request must be to reach them
html_report       the same page and one payload in a single file
static_build      the page with precomputed answers, for any web host or a disk
page/             the page's modules, without a build step: `draw(payload)` of each view, used by the page and by reports

A view has the payload of the command that prints the same numbers with `--json`, under that command's name.
"""
