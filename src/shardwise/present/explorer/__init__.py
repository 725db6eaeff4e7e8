"""Explorer and HTML reports: Python answers questions, a page draws the answers.

state             the page's state as one value, and its address: the query of a URL
opened_plan       names of a state to models, clusters and jobs
request           a state with the values of its names
*_view(s)         a pure function for each view: a request -> the payload of `--json`, with the provenance of its numbers
controls          choices: every option with its edit of the address, and the problem with it
run_card          days, dollars and energy of the training run
book_tasks        tasks from the books: a start, a goal, and a check of the state
background_search the best layout and the Pareto front of a job, in a process of its own
explorer          questions to payloads, and the cache of requests
answer_workers    processes that answer questions, each within a time limit
page_wording      problems in the page's wording, without flags
web_server        the routes; `request_guard` refuses requests of other hosts and origins, `http_connections` slow ones
html_report       the page's modules and one payload in a single file
static_build      the page with computed answers, for any web host or a disk
page/             the page's modules, without a build step: `draw(payload)` of each view, used by the page and by reports

A view has the payload of the command that prints the same numbers with `--json`, under that command's name.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
