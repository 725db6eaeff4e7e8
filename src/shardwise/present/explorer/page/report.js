// A report: the payload in the page, drawn by the explorer's own modules. It asks for nothing.

import { PANEL, h, inside, panel } from "./dom.js";
import { drawExplanation } from "./explained.js";
import { drawMeasured } from "./measured.js";
import { drawNotation } from "./notation.js";
import { drawPriced, drawVerdict } from "./overview.js";
import { drawPareto } from "./pareto.js";
import { drawRoofline } from "./roofline.js";
import { drawSchedule } from "./schedule.js";
import { drawSweep } from "./swept.js";
import { drawTimeline } from "./timeline.js";
import { drawValidation } from "./validated.js";
import { Why } from "./why.js";

const SCHEMA = "shardwise.report/1";
const DRAW = {
  plan: drawPlan,
  explain: drawExplanation,
  reconcile: (found, context) => drawMeasured({ reconcile: found }, context),
  validate: drawValidation,
  sweep: drawSweep,
};
const content = document.getElementById("content");

function drawPlan({ views, why }, context) {
  const known = new Why(async (name) => ({ why: why[name] }));
  const here = (payload) => ({ ...context, why: (name) => known.show(name, payload) });
  const or = (payload, drawing, title, width = context.width) =>
    payload.problems?.length
      ? panel(title, {}, h("p", { class: "quiet" }, payload.problems[0]))
      : drawing(payload, { ...here(payload), width });
  return [
    drawVerdict(views.overview, here(views.overview)),
    drawPriced(views.overview, here(views.overview)),
    or(views.timeline, drawTimeline, "Simulated step"),
    h(
      "div",
      { class: "pair" },
      or(views.roofline, drawRoofline, "Roofline of a block", context.half),
      or(views.pareto, drawPareto, "Pareto front", context.half),
    ),
    or(views.schedule, drawSchedule, "Schedule"),
    or(views.notation, drawNotation, "The mesh"),
  ];
}

function broken(reason) {
  content.replaceChildren(
    h(
      "section",
      { class: "verdict cannot", role: "alert" },
      h("h1", {}, h("span", { class: "mark bad", "aria-hidden": "true" }, "✕"), "This report cannot be read"),
      h("p", {}, `${reason}; write it again with this version of shardwise`),
    ),
  );
}

// The payload, or null after saying what is wrong with it.
function read() {
  let found = null;
  try {
    found = JSON.parse(document.getElementById("payload").textContent);
  } catch (error) {
    broken(`its payload is not JSON (${error.message})`);
    return null;
  }
  if (found?.schema !== SCHEMA || !DRAW[found.kind]) {
    broken(`found schema ${found?.schema} of kind ${found?.kind}; ${SCHEMA} is required`);
    return null;
  }
  return found;
}

function draw(found) {
  const width = inside(content) - PANEL;
  const context = { width, half: width > 760 ? (width - 50) / 2 : width };
  try {
    content.replaceChildren(
      h("h1", {}, found.title),
      ...[DRAW[found.kind](found.payload, context)].flat(Infinity).filter(Boolean),
    );
  } catch (error) {
    broken(`its payload lacks what a report of a ${found.kind} has (${error.message})`);
  }
}

function theme() {
  const dark =
    document.documentElement.dataset.theme ?? (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  document.documentElement.dataset.theme = dark === "dark" ? "light" : "dark";
}

const found = read();
document
  .getElementById("head")
  .replaceChildren(
    h("strong", { class: "name" }, "shardwise"),
    h("nav", {}, found ? found.kind : "report"),
    h("div", { class: "tools" }, h("button", { type: "button", onclick: theme, "aria-label": "light or dark" }, "◐")),
  );
if (found) {
  draw(found);
  let resizing = null;
  addEventListener("resize", () => {
    clearTimeout(resizing);
    resizing = setTimeout(() => draw(found), 120);
  });
}
