// The explorer's page: an address in, figures out.

import { Controls } from "./controls.js";
import { Copy } from "./copy.js";
import { PANEL, h, innerWidth, panel, toggleTheme } from "./dom.js";
import { edited } from "./query.js";
import { drawReport, mark } from "./sections.js";
import { build, isAvailable } from "./static.js";
import { Store, answer } from "./store.js";
import { drawTask, taskMenu } from "./book_task.js";
import { Why } from "./why.js";

const VIEWS = {
  overview: "Overview",
  notation: "Notation",
  memory: "Memory",
  schedule: "Schedule",
  batch: "Critical batch",
  serving: "Serving",
  run: "Run",
};
// Figures of the overview, which have questions of their own.
const TITLES = { timeline: "Simulated step", roofline: "Roofline of a block", pareto: "Pareto front" };
const SETTLED = 140; // milliseconds without a drag before figures that take longer are asked for
const AGAIN = 700; // milliseconds between looks at a search
const WAITING = {
  timeline: "simulating a step of this layout",
  roofline: "pricing the kernels of a block",
  pareto: "searching all layouts of this job",
};
const RESIZED = 120; // milliseconds without a change of the room before it is drawn again

const content = document.getElementById("content"),
  task = document.getElementById("task"),
  live = document.getElementById("live");
const store = new Store(location.search.slice(1));
const controls = new Controls(document.getElementById("controls"), go);
// The state that is shown, layout included, which the address lacks while the best layout is searched.
const shownQuery = () => last?.query ?? store.query;
const why = new Why((name) => answer("why", edited(shownQuery(), { term: name })));
const copy = new Copy((target) => answer("copy", edited(shownQuery(), { target })));
const slots = {
  verdict: h("div", {}),
  priced: h("div", {}),
  timeline: h("div", { class: "below" }),
  roofline: h("div", { class: "below" }),
  pareto: h("div", { class: "below" }),
};
const drawn = new Map(); // the query and the payload of each figure
let last = null,
  settling = null,
  looking = null,
  announced = "", // what a screen reader reads in place of the verdict, until the state changes
  changes = 0; // of the state by the reader

// The room for figures is measured when it changes: asking for it while drawing would lay out the page once more.
let room = innerWidth(content);
let resizing = null;
new ResizeObserver(([{ contentRect }]) => {
  if (Math.round(contentRect.width) === room) return;
  room = Math.round(contentRect.width);
  clearTimeout(resizing);
  resizing = setTimeout(() => show(store.query), RESIZED);
}).observe(content);

// What a drawing of a payload gets: its room, where its numbers are from, and how the state is changed.
function context(payload) {
  const width = room - PANEL;
  return {
    width,
    half: width > 760 ? (width - 50) / 2 : width,
    why: (name) => why.show(name, payload),
    copy: (command) => copy.show("command", command),
    payload,
    go: (edit, options) => go(edit, { push: true, ...options }),
  };
}

// Change the state, and show what follows.
async function go(edit, { dragging = false, push = false } = {}) {
  if (!Object.keys(edit).length) return;
  const query = store.edited(edit);
  if (build && (await leavesBuild(query))) return;
  await show(query, { dragging, push });
}

// Whether a static build lacks a state, which the page then says in place of showing it.
async function leavesBuild(query) {
  const view = new URLSearchParams(query).get("view") ?? "overview";
  const isMissing = !(await isAvailable(view, query));
  const note = document.getElementById("unavailable");
  note.hidden = !isMissing;
  const text = "That is not in the static build: `shardwise explore` on your machine has every view of every layout.";
  note.textContent = isMissing ? text : "";
  return isMissing;
}

// `looking`: an answer that says nothing new about the search leaves the page, and its focus, as they are.
async function show(query, { dragging = false, push = false, looking = false } = {}) {
  const view = new URLSearchParams(query).get("view") ?? "overview";
  const question = view in VIEWS ? view : "overview";
  document.documentElement.dataset.busy = "true";
  if (!last) tabs(question);
  if (!looking) changes += 1;
  const change = changes;
  const payload = await store.ask(question, query);
  if (payload === null) return;
  if (looking && change !== changes) return; // the reader has changed the state since: the answer is of an earlier one
  document.documentElement.dataset.busy = "false";
  if (payload.failed) {
    failed(payload.failed, query, view, push);
    return;
  }
  if (payload.view !== question) return show(payload.query, { dragging, push }); // an address without a query opens a view of its own
  if (looking && last?.query === payload.query && JSON.stringify(last.search) === JSON.stringify(payload.search)) return look();
  const moved = last?.layout_source === "fallback" && payload.layout_source === "search";
  if (last?.query !== payload.query) announced = "";
  last = payload;
  // An address without a layout follows the search; with the fallback in it, it would stay there.
  const address = payload.layout_source === "fallback" ? edited(payload.query, { layout: null }) : payload.query;
  store.take(address, { push, dragging });
  showTask(payload.task); // before the menu, which marks the tasks that are done
  tabs(payload.view);
  if (payload.controls) controls.update(payload.controls);
  document.title = `${payload.layout_text} · ${payload.model_name} · shardwise`;
  if (moved) announced = `the search has ended: the page shows the best layout, ${payload.layout_text}`;
  draw(payload);
  announce(announced || (question === "overview" ? slots.verdict.querySelector("h1").textContent : ""));
  if (question === "overview") figures(dragging);
  else look();
}

// The same text is left alone: a screen reader would read it again.
function announce(text) {
  if (text && live.textContent !== text) live.textContent = text;
}

// The task and its progress, above every view. The hint stays open from state to state.
function showTask(progress) {
  const wasDone = task.querySelector(".task.done") !== null;
  const isOpen = task.querySelector("details")?.open;
  const leave = (query) => (query === null ? go({ task: null }, { push: true }) : show(query, { push: true }));
  const focused = task.contains(document.activeElement) ? document.activeElement.textContent : null;
  task.replaceChildren(...[drawTask(progress, leave)].filter(Boolean));
  if (isOpen) task.querySelector("details").open = true;
  if (focused) [...task.querySelectorAll("button, summary")].find((element) => element.textContent === focused)?.focus();
  if (progress?.done && !wasDone) announced = `task done: ${progress.title}`;
}

// A state that has no numbers: what is wrong, with the choices as they were.
function failed(problems, query, view, push) {
  store.take(query, { push });
  tabs(view);
  last = null;
  task.replaceChildren();
  content.replaceChildren(
    h(
      "section",
      { class: "verdict cannot" },
      h("h1", {}, mark(false), "No answer"),
      h(
        "ul",
        {},
        problems.map((problem) => h("li", {}, problem)),
      ),
      h(
        "p",
        {},
        h(
          "button",
          { type: "button", onclick: () => go({ layout: null, view: null }, { push: true }) },
          "take the best layout of this job",
        ),
      ),
    ),
  );
  announce(problems[0]);
}

function draw(payload) {
  const report = drawReport(payload.report, context(payload));
  if (payload.view !== "overview") {
    content.replaceChildren(...report);
    return;
  }
  if (content.firstChild !== slots.verdict)
    content.replaceChildren(slots.verdict, slots.priced, slots.timeline, h("div", { class: "pair" }, slots.roofline, slots.pareto));
  slots.verdict.replaceChildren(report[0]);
  slots.priced.replaceChildren(...report.slice(1));
  for (const name of Object.keys(TITLES)) if (!slots[name].firstChild) slots[name].replaceChildren(waiting(name, WAITING[name]));
}

const waiting = (name, text) => panel(TITLES[name], { class: "panel" }, h("p", { class: "quiet" }, text));

// A figure with all of the room, or half of it; its answer may fail.
function drawFigure(name, payload) {
  if (payload.failed) return waiting(name, payload.failed[0]);
  const figureContext = context(payload);
  const report = payload.report.map((section) => ({ ...section, half: false })); // its slot has half of the width already
  return drawReport(report, name === "timeline" ? figureContext : { ...figureContext, width: figureContext.half });
}

// Whether the best layout is the answer to a task that is still worked on.
const hidesBest = ({ task: progress }) => Boolean(progress && !progress.done);

// Figures that take longer than a drag allows: once it rests.
function figures(dragging) {
  clearTimeout(settling);
  settling = setTimeout(
    async () => {
      const query = last.query;
      let state = null;
      for (const name of Object.keys(TITLES)) {
        if (name === "pareto" && hidesBest(last)) {
          slots[name].replaceChildren(waiting(name, "hidden until the task is done: it has the answer"));
          continue;
        }
        if (last.problems.length && name !== "pareto") {
          slots[name].replaceChildren();
          drawn.delete(name);
          continue;
        }
        const payload = await figurePayload(name, query);
        if (payload === null || query !== last?.query) return;
        state = payload.search?.state;
        slots[name].replaceChildren(...[drawFigure(name, payload)].flat());
      }
      look(state === "done" ? 0 : AGAIN);
    },
    dragging ? SETTLED : 0,
  );
}

// The payload of a figure, which is asked for once for each state; that of a search until it has ended.
async function figurePayload(name, query) {
  const cached = drawn.get(name);
  if (cached?.query === query && cached.payload.search?.state !== "searching") return cached.payload;
  const payload = await store.ask(name, query);
  if (payload !== null) drawn.set(name, { query, payload });
  return payload;
}

// While a search runs, what it has found so far; at once where a figure has its end.
function look(after = AGAIN) {
  clearTimeout(looking);
  if (last?.search?.state !== "searching") return;
  looking = setTimeout(() => {
    if (!controls.dragged && document.documentElement.dataset.busy !== "true") show(store.query, { looking: true });
    else look();
  }, after);
}

function tabs(view) {
  const names = Object.entries(VIEWS).filter(
    ([name]) => (name !== "run" || last?.has_run || view === "run") && (!build || build.views.includes(name)),
  );
  const links = names.map(([name, title]) =>
    h(
      "a",
      {
        href: `?${store.edited({ view: name === "overview" ? null : name })}`,
        "aria-current": name === view ? "page" : null,
        onclick: (event) => {
          event.preventDefault();
          go({ view: name === "overview" ? null : name }, { push: true });
        },
      },
      title,
    ),
  );
  const before = document.querySelector("#head nav a[aria-current]")?.textContent;
  const focused = document.activeElement?.closest?.("#head nav a")?.textContent;
  document
    .getElementById("head")
    .replaceChildren(
      h("strong", { class: "name" }, "shardwise"),
      h("nav", { "aria-label": "views" }, links),
      ...(last?.tasks?.length ? [taskMenu(last.tasks, last.task?.name, (query) => show(query, { push: true }))] : []),
      h(
        "div",
        { class: "tools" },
        h("button", { type: "button", onclick: () => copy.open() }, "copy as"),
        h("button", { type: "button", onclick: toggleTheme, "aria-label": "light or dark" }, "◐"),
      ),
    );
  const current = document.querySelector("#head nav a[aria-current]");
  if (current && current.textContent !== before) current.scrollIntoView({ inline: "nearest", block: "nearest" });
  if (focused) [...document.querySelectorAll("#head nav a")].find((link) => link.textContent === focused)?.focus();
}

addEventListener("popstate", () => show(location.search.slice(1)));
show(store.query);
